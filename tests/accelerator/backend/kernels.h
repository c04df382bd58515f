// The kernels of rows.cu, built for the host: a block after the other, and in it a thread after the other.
#pragma once

#include "controls.h"

#include <cmath>
#include <string>

struct uint4 {
  unsigned x, y, z, w;
};
static thread_local struct {
  long long x;
} blockIdx;
static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static void __syncthreads() {}
#define __device__
#define __global__
#define __shared__ static thread_local
#define EACH_THREAD for (int t = 0; t < THREADS; t++)
#include "rows.cu"

extern "C" void simulated_launch(int device, const char* kernel, int64_t blocks, const int64_t* given, int count) {
  const std::string name = kernel;
  std::vector<int64_t> a(given, given + count);
  simulated::counters().add(simulated::KERNEL);
  // Memory is translated when the kernel runs, that of the table by entry.
  simulated::current_queue(device).enqueue(
      [=] {
        const auto at = [](int64_t address) {
          return static_cast<char*>(simulated::kernel_address(reinterpret_cast<void*>(address)));
        };
        const auto* sent = reinterpret_cast<const Entry*>(at(a[0]));
        std::vector<Entry> table(sent, sent + a[1]);
        for (Entry& entry : table) {
          TORCH_CHECK(!entry.address || at(entry.address), name, ": no memory of a device");
          entry.address = reinterpret_cast<long long>(at(entry.address));
        }
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
          if (name == "measure_rows") {
            measure_rows(table.data(), a[1], reinterpret_cast<double*>(at(a[2])), a[3]);
          } else if (name == "digest_rows") {
            auto* digests = reinterpret_cast<long long*>(at(a[2]));
            digest_rows(table.data(), a[1], digests, reinterpret_cast<double*>(at(a[3])));
          } else if (name == "keep_rows") {
            keep_rows(table.data(), a[1], at(a[2]));
          } else {
            compare_rows(table.data(), a[1], at(a[2]), a[3], reinterpret_cast<double*>(at(a[4])), a[5]);
          }
        }
      },
      true);
}
