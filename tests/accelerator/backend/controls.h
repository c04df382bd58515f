// What the tests read and set, called through ctypes.
#pragma once

#include "guard.h"

#include <ATen/core/Tensor.h>

#include <cstring>

extern "C" {
int64_t simulated_count(int counter, int thread) {
  auto& all = simulated::counters();
  std::lock_guard<std::mutex> lock(all.mutex);
  int64_t sum = 0;
  for (const auto& [key, count] : all.counts) {
    sum += key.first == counter && (thread < 0 || key.second == thread) ? count : 0;
  }
  return sum;
}
int simulated_threads(int counter, int* found, int most) {
  auto& all = simulated::counters();
  std::lock_guard<std::mutex> lock(all.mutex);
  int number = 0;
  for (const auto& [key, count] : all.counts) {
    if (key.first == counter && number < most) {
      found[number++] = key.second;
    }
  }
  return number;
}
void simulated_forbid_synchronization(int is_forbidden) {
  simulated::counters().forbidding = is_forbidden ? gettid() : 0;
}
void simulated_delay(int device, int64_t microseconds) {
  simulated::device(device).delay_us = microseconds;
}
void simulated_sleep(int64_t microseconds) {
  simulated::current_queue(simulated::current_device)
      .enqueue([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }, false);
}
void simulated_capture(int is_capturing) {
  simulated::current_queue(simulated::current_device).capturing = is_capturing;
}
void simulated_seed(int device, uint64_t seed) {
  at::Generator generator = simulated::default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}
// Copy the random state of a device to `state` of `size` bytes, or from it; return the size of a state.
int64_t simulated_random_state(int device, void* state, int64_t size, int is_set) {
  at::Generator generator = simulated::default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor now = generator.get_state();
  if (size == now.numel()) {
    if (is_set) {
      std::memcpy(now.data_ptr(), state, size);
      generator.set_state(now);
    } else {
      std::memcpy(state, now.data_ptr(), size);
    }
  }
  return now.numel();
}
void simulated_wait() {
  for (int index = 0; index < simulated::DEVICES; ++index) {
    simulated::device(index).wait();
  }
}
}
