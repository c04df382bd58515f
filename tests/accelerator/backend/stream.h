// Streams and events. Each stream runs its jobs in order, later, on a thread of its own.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>

namespace simulated {

constexpr int DEVICES = 2;
constexpr int STREAMS = 8; // per device; new streams after these reuse them, as CUDA's pool does
using Clock = std::chrono::steady_clock;
using Job = std::function<void()>;

enum Counter { SYNCHRONIZATION, DEVICE_TO_HOST, KERNEL, COUNTERS };

// Counts by thread, and an error in place of a synchronisation in the thread that forbids it.
struct Counters {
  std::mutex mutex;
  std::map<std::pair<int, int>, int64_t> counts; // (counter, thread) -> count
  std::atomic<int> forbidding{0};

  void add(Counter counter) {
    if (counter == SYNCHRONIZATION && forbidding == gettid()) {
      TORCH_CHECK(false, "simulated accelerator: synchronization where it is forbidden");
    }
    std::lock_guard<std::mutex> lock(mutex);
    ++counts[{counter, gettid()}];
  }
};
inline Counters& counters() {
  static auto* all = new Counters;
  return *all;
}

// The first error of a job of a device, raised by the next synchronisation.
struct Failure {
  std::mutex mutex;
  std::string text;

  void set(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex);
    if (text.empty()) {
      text = what;
    }
  }
  void raise() {
    std::lock_guard<std::mutex> lock(mutex);
    std::string found;
    found.swap(text);
    TORCH_CHECK(found.empty(), "simulated accelerator: ", found);
  }
};

class Queue {
 public:
  Queue(Failure& failure, std::atomic<int64_t>& delay_us) : failure_(failure), delay_us_(delay_us) {
    std::thread([this] { run(); }).detach(); // queues live as long as the process
  }

  // Enqueue a job and return its number. A kernel starts after the delay of its device.
  uint64_t enqueue(Job job, bool is_kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.emplace_back(std::move(job), is_kernel);
    changed_.notify_all();
    return ++enqueued_;
  }
  uint64_t enqueued() {
    std::lock_guard<std::mutex> lock(mutex_);
    return enqueued_;
  }
  bool passed(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= number;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this, last = enqueued_] { return done_ >= last; });
  }
  std::atomic<bool> capturing{false};

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      auto [job, is_kernel] = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      if (is_kernel && delay_us_ > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us_));
      }
      try {
        job();
      } catch (const std::exception& error) {
        failure_.set(error.what());
      }
      job = nullptr; // frees what it holds before it counts as done
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Job, bool>> jobs_;
  uint64_t enqueued_ = 0, done_ = 0;
  Failure& failure_;
  std::atomic<int64_t>& delay_us_;
};

struct Device {
  std::mutex mutex;
  Failure failure;
  std::atomic<int64_t> delay_us{0};
  std::array<std::unique_ptr<Queue>, STREAMS> queues; // 0 is the default stream
  int created = 0;

  Queue& queue(c10::StreamId id) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& found = queues.at(id);
    if (!found) {
      found = std::make_unique<Queue>(failure, delay_us);
    }
    return *found;
  }
  c10::StreamId new_stream() {
    std::lock_guard<std::mutex> lock(mutex);
    return 1 + created++ % (STREAMS - 1);
  }
  void wait() {
    for (int id = 0; id < STREAMS; ++id) {
      mutex.lock();
      Queue* queue = queues[id].get();
      mutex.unlock();
      if (queue) {
        queue->wait();
      }
    }
  }
};
inline Device& device(int index) {
  static auto* all = new std::array<Device, DEVICES>;
  return all->at(index);
}

inline thread_local int current_device = 0;
inline thread_local std::array<c10::StreamId, DEVICES> current_streams{};

inline c10::Stream stream_of(int index) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, index), current_streams.at(index));
}
inline Queue& queue_of(const c10::Stream& stream) {
  return device(stream.device_index()).queue(stream.id());
}
inline Queue& current_queue(int index) {
  return queue_of(stream_of(index));
}

inline void synchronize(Queue& queue, int index) {
  counters().add(SYNCHRONIZATION);
  queue.wait();
  device(index).failure.raise();
}

class Event {
 public:
  static void record(const std::shared_ptr<Event>& event, Queue& queue) {
    std::unique_lock<std::mutex> lock(event->mutex_);
    const uint64_t version = ++event->version_;
    lock.unlock();
    queue.enqueue(
        [event, version] {
          std::lock_guard<std::mutex> lock(event->mutex_);
          event->done_ = std::max(event->done_, version);
          event->time_ = Clock::now();
          event->changed_.notify_all();
        },
        false);
  }
  // The queue runs nothing more until the event is over, as it was recorded when this is called.
  static void block(const std::shared_ptr<Event>& event, Queue& queue) {
    std::unique_lock<std::mutex> lock(event->mutex_);
    const uint64_t version = event->version_;
    lock.unlock();
    queue.enqueue([event, version] { event->wait(version); }, false);
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == version_;
  }
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t version = version_;
    lock.unlock();
    wait(version);
  }
  static double milliseconds(Event& begin, Event& end) {
    TORCH_CHECK(begin.query() && end.query(), "simulated accelerator: the events are not over");
    return std::chrono::duration<double, std::milli>(end.time_ - begin.time_).count();
  }

 private:
  void wait(uint64_t version) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= version; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t version_ = 0, done_ = 0;
  Clock::time_point time_;
};

} // namespace simulated
