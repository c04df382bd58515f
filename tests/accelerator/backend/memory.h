// Device memory that the host cannot read, its caching allocator, and pinned host memory.
//
// The pages of a device are mapped twice: tensors hold addresses of a mapping without any access, kernels add
// an offset that leads to a readable one. A host access through a tensor's address is a segmentation fault.
#pragma once

#include "stream.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sys/mman.h>
#include <vector>

namespace simulated {

constexpr size_t CAPACITY_BYTES = size_t(512) << 20;
constexpr size_t GRANULE_BYTES = 512;

struct Arena {
  char* base;
  char* readable;

  Arena() {
    const int file = memfd_create("simulated-accelerator", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, CAPACITY_BYTES) == 0, "simulated accelerator: no memory");
    base = map(file, PROT_NONE);
    readable = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }
  static char* map(int file, int protection) {
    void* found = mmap(nullptr, CAPACITY_BYTES, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(found != MAP_FAILED, "simulated accelerator: mmap failed");
    return static_cast<char*>(found);
  }
  bool holds(const void* address) const {
    const auto* byte = static_cast<const char*>(address);
    return byte >= base && byte < base + CAPACITY_BYTES;
  }
};
inline Arena& arena(int index) {
  static auto* all = new std::array<Arena, DEVICES>;
  return all->at(index);
}
inline int device_of(const void* address) {
  for (int index = 0; index < DEVICES; ++index) {
    if (arena(index).holds(address)) {
      return index;
    }
  }
  return -1;
}
// Return the address at which a kernel reaches memory of a device.
inline void* kernel_address(const void* address) {
  const int index = device_of(address);
  if (index < 0) { // an empty tensor
    return nullptr;
  }
  return arena(index).readable + (static_cast<const char*>(address) - arena(index).base);
}

// A point in a stream that must be passed before memory is used again.
struct Use {
  Queue* queue;
  uint64_t number;
};
inline bool all_passed(const std::vector<Use>& uses) {
  return std::all_of(uses.begin(), uses.end(), [](const Use& use) { return use.queue->passed(use.number); });
}

struct Block {
  char* address;
  size_t size;
  int device;
  c10::StreamId stream;
  size_t requested = 0;
  bool in_use = true, reserved = true;
  std::set<c10::StreamId> other_streams = {};
  std::vector<Use> uses = {};
};

// Memory is used again at once by the stream that it was allocated in, and by no other, as with CUDA: work of
// another stream needs record_stream, or reads what came later.
class CachingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device;
    const c10::Device where(c10::DeviceType::PrivateUse1, index);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, where};
    }
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = take((bytes + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES, index);
    block->requested = bytes;
    count(*block, 1);
    return {block->address, block, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(kernel_address(to), kernel_address(from), count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& block : blocks_) {
      if (!block->in_use && block->reserved && all_passed(block->uses)) {
        reserve(*block, false);
      }
    }
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = static_cast<Block*>(memory.get_context());
    if (block && block->stream != stream.id()) {
      block->other_streams.insert(stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return statistics_.at(index);
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    reset(index, [](c10::CachingAllocator::Stat& one) { one.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    reset(index, [](c10::CachingAllocator::Stat& one) { one.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto reserved = statistics_.at(index).reserved_bytes[0].current;
    return {CAPACITY_BYTES - reserved, CAPACITY_BYTES};
  }

 private:
  static void release(void* context);

  Block* take(size_t size, int index) {
    const c10::StreamId stream = current_streams.at(index);
    if (Block* found = find(size, 2 * size, index, stream)) {
      return found;
    }
    if (next_[index] + size <= CAPACITY_BYTES) {
      char* address = arena(index).base + next_[index];
      blocks_.push_back(std::make_unique<Block>(Block{address, size, index, stream}));
      next_[index] += size;
      reserve(*blocks_.back(), true);
      return blocks_.back().get();
    }
    ++statistics_[index].num_alloc_retries;
    device(index).wait();
    if (Block* found = find(size, CAPACITY_BYTES, index, -1)) {
      found->stream = stream;
      return found;
    }
    ++statistics_[index].num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated accelerator out of memory: ", size, " bytes");
  }
  Block* find(size_t least, size_t most, int index, c10::StreamId stream) {
    Block* best = nullptr;
    for (auto& block : blocks_) {
      if (!block->in_use && block->device == index && (stream < 0 || block->stream == stream) &&
          block->size >= least && block->size <= most && (!best || block->size < best->size) &&
          all_passed(block->uses)) {
        best = block.get();
      }
    }
    if (best) {
      best->in_use = true;
      best->uses.clear();
      if (!best->reserved) {
        reserve(*best, true);
      }
    }
    return best;
  }
  static void add(c10::CachingAllocator::StatArray& kinds, int64_t amount) {
    auto& all = kinds[0]; // StatType::AGGREGATE
    amount > 0 ? all.increase(amount) : all.decrease(-amount);
  }
  void reserve(Block& block, bool is_reserved) {
    block.reserved = is_reserved;
    const int64_t sign = is_reserved ? 1 : -1;
    add(statistics_[block.device].segment, sign);
    add(statistics_[block.device].reserved_bytes, sign * static_cast<int64_t>(block.size));
  }
  void count(const Block& block, int64_t sign) {
    auto& all = statistics_[block.device];
    add(all.allocation, sign);
    add(all.active, sign);
    add(all.allocated_bytes, sign * static_cast<int64_t>(block.size));
    add(all.active_bytes, sign * static_cast<int64_t>(block.size));
    add(all.requested_bytes, sign * static_cast<int64_t>(block.requested));
  }
  template <typename Change>
  void reset(int index, Change change) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& all = statistics_.at(index);
    for (auto* kinds : {&all.allocation, &all.segment, &all.active, &all.allocated_bytes, &all.reserved_bytes,
                        &all.active_bytes, &all.requested_bytes}) {
      change((*kinds)[0]);
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::array<size_t, DEVICES> next_{};
  std::array<c10::CachingDeviceAllocator::DeviceStats, DEVICES> statistics_{};
};
inline CachingAllocator& allocator() {
  static auto* one = new CachingAllocator;
  return *one;
}
inline void CachingAllocator::release(void* context) {
  if (!context) {
    return;
  }
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(allocator().mutex_);
  for (const auto stream : block->other_streams) {
    Queue& queue = device(block->device).queue(stream);
    block->uses.push_back({&queue, queue.enqueued()});
  }
  block->other_streams.clear();
  block->in_use = false;
  allocator().count(*block, -1);
}

// Page-locked host memory: copies from and to it run in their stream, and it is used again only after them.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [address, block] : blocks_) {
      if (!block.in_use && block.size == bytes && all_passed(block.uses)) {
        block.in_use = true;
        block.uses.clear();
        return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
      }
    }
    auto* address = static_cast<char*>(c10::alloc_cpu(std::max<size_t>(bytes, 1)));
    blocks_[address] = {bytes, true, {}};
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
  bool is_pinned(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != nullptr;
  }
  void use(const void* address, Queue& queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Pinned* block = find(address)) {
      block->uses.push_back({&queue, queue.enqueued()});
    }
  }

 private:
  struct Pinned {
    size_t size;
    bool in_use;
    std::vector<Use> uses;
  };
  static void release(void* address);
  Pinned* find(const void* address) {
    auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == blocks_.begin()) {
      return nullptr;
    }
    auto& [begin, block] = *std::prev(after);
    return static_cast<const char*>(address) < begin + std::max<size_t>(block.size, 1) ? &block : nullptr;
  }
  std::mutex mutex_;
  std::map<char*, Pinned> blocks_;
};
inline PinnedAllocator& pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return *one;
}
inline void PinnedAllocator::release(void* address) {
  std::lock_guard<std::mutex> lock(pinned_allocator().mutex_);
  pinned_allocator().blocks_.at(static_cast<char*>(address)).in_use = false;
}

} // namespace simulated
