// What torch asks a back-end for: the current device and stream, events, generators, pinned memory.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

inline int exchange_device(int index) {
  TORCH_CHECK(index >= 0 && index < DEVICES, "simulated accelerator: no device ", index);
  return std::exchange(current_device, index);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Handle = std::shared_ptr<Event>;

  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device one) const override {
    return {TYPE, static_cast<c10::DeviceIndex>(exchange_device(one.index()))};
  }
  c10::Device getDevice() const override {
    return {TYPE, static_cast<c10::DeviceIndex>(current_device)};
  }
  void setDevice(c10::Device one) const override {
    exchange_device(one.index());
  }
  void uncheckedSetDevice(c10::Device one) const noexcept override {
    current_device = one.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  c10::Stream getStream(c10::Device one) const override {
    return stream_of(one.has_index() ? one.index() : current_device);
  }
  c10::Stream getDefaultStream(c10::Device one) const override {
    return c10::Stream(c10::Stream::DEFAULT, one);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device one, bool) const override {
    return getNewStream(one, 0);
  }
  c10::Stream getNewStream(c10::Device one, int) const override {
    const auto index = one.has_index() ? one.index() : static_cast<c10::DeviceIndex>(current_device);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index), device(index).new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = stream_of(stream.device_index());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream).passed(queue_of(stream).enqueued());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(queue_of(stream), stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    counters().add(SYNCHRONIZATION);
    device(index).wait();
    device(index).failure.raise();
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return queue_of(stream).capturing;
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator().recordStream(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) {
      *event = new Handle(std::make_shared<Event>());
    }
    Event::record(*static_cast<Handle*>(*event), queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      Event::block(*static_cast<Handle*>(event), queue_of(stream));
    }
  }
  bool queryEvent(void* event) const override {
    return !event || (*static_cast<Handle*>(event))->query();
  }
  void synchronizeEvent(void* event) const override {
    counters().add(SYNCHRONIZATION);
    if (event) {
      (*static_cast<Handle*>(event))->synchronize();
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Handle*>(event);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return Event::milliseconds(**static_cast<Handle*>(begin), **static_cast<Handle*>(end));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Each random kernel takes its seed from the generator of its device when it is launched.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(TYPE, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
inline const at::Generator& default_generator(int index) {
  static auto* all = new std::vector<at::Generator>{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? static_cast<c10::DeviceIndex>(current_device) : index);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    return {TYPE, static_cast<c10::DeviceIndex>(device_of(address))};
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned_allocator().is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
};

} // namespace simulated
