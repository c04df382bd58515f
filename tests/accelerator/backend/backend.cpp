// Operators of the simulated accelerator: torch's CPU kernels, run later on the memory of the device by the
// thread of the stream. Memory is passed by address only: as on a real device, a kernel keeps nothing alive.

#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// CPU kernels below autograd and autocast, in the thread of a stream or, for shapes, in the caller's.
struct CpuKernels {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

void launch(int index, Job job) {
  counters().add(KERNEL);
  current_queue(index).enqueue(
      [job = std::move(job)] {
        CpuKernels kernels;
        job();
      },
      true);
}

// A tensor of the host on the same memory; nothing reads it here.
Tensor wrapped(const Tensor& tensor, void* address) {
  return at::for_blob(address, tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(c10::kCPU).requires_grad(false))
      .target_device(c10::kCPU)
      .make_tensor();
}
Tensor kernel_view(const Tensor& tensor) {
  void* address = tensor.numel() ? kernel_address(tensor.const_data_ptr()) : nullptr;
  return wrapped(tensor, address);
}

// Scalars and index tensors of the host are read when the kernel is launched.
Tensor host_copy(const Tensor& tensor) {
  Tensor copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}
Tensor dummy(const Tensor& tensor) {
  if (!on_device(tensor)) {
    return tensor.defined() ? host_copy(tensor) : tensor;
  }
  CpuKernels kernels;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU)).zero_();
}
Tensor argument(const Tensor& tensor) {
  return on_device(tensor) ? kernel_view(tensor) : tensor.defined() ? host_copy(tensor) : tensor;
}

using Translation = Tensor (*)(const Tensor&);

IValue translate(const IValue& value, Translation tensor) {
  if (value.isTensor()) {
    return tensor(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& one : value.toTensorVector()) {
      all.push_back(tensor(one));
    }
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& one : value.toOptionalTensorVector()) {
      all.push_back(one ? std::optional<Tensor>(tensor(*one)) : one);
    }
    return all;
  }
  if (value.isDevice()) {
    return c10::Device(c10::kCPU);
  }
  if (value.isGenerator()) {
    return at::detail::createCPUGenerator();
  }
  return value;
}

// Return a generator for one kernel, and advance the device's.
at::Generator drawn(const IValue& given, int index) {
  at::Generator source = given.isGenerator() ? given.toGenerator() : default_generator(index);
  TORCH_CHECK(source.device().type() == TYPE, "simulated accelerator: a generator of the host");
  std::lock_guard<std::mutex> lock(source.mutex());
  return at::detail::createCPUGenerator(source.get<at::CPUGeneratorImpl>()->random64());
}

int device_of_arguments(at::ArrayRef<IValue> arguments) {
  for (const IValue& value : arguments) {
    if (value.isTensor() && on_device(value.toTensor())) {
      return value.toTensor().device().index();
    }
    if (value.isTensorList() && !value.toTensorVector().empty() && on_device(value.toTensorVector()[0])) {
      return value.toTensorVector()[0].device().index();
    }
    if (value.isDevice() && value.toDevice().has_index()) {
      return value.toDevice().index();
    }
  }
  return current_device;
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  const c10::DeviceGuard guard(where.value_or(c10::Device(TYPE, current_device)));
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(where.value_or(c10::Device(TYPE, current_device)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_as(const Tensor& host, int index) {
  return empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, c10::Device(TYPE, index), {});
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) {
    return;
  }
  const int index = storage.device().index();
  const c10::DeviceGuard guard(storage.device());
  auto memory = allocator().allocate(bytes);
  if (storage.nbytes()) {
    void *to = kernel_address(memory.get()), *from = kernel_address(storage.data());
    launch(index, [to, from, count = storage.nbytes()] { std::memcpy(to, from, count); });
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* one = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    one->set_sizes_contiguous(size);
  }
  if (format && *format != at::MemoryFormat::Preserve) {
    one->empty_tensor_restride(*format);
  }
  grow(self.storage(), (self.storage_offset() + self.numel()) * self.itemsize());
  return self;
}

// Kernels whose results have a size that depends on values, or that give a number to the host, must wait.
bool must_wait(const std::string& name) {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_consecutive",
      "aten::unique_dim", "aten::bincount", "aten::repeat_interleave", "aten::multinomial"};
  return names.count(name) > 0;
}

void run_now(const c10::OperatorHandle& op, Stack& host, int index) {
  counters().add(DEVICE_TO_HOST);
  synchronize(current_queue(index), index);
  CpuKernels kernels;
  op.callBoxed(host);
}

IValue to_device(const IValue& value, int index) {
  if (!value.isTensor()) {
    return value;
  }
  Tensor result = empty_as(value.toTensor(), index);
  kernel_view(result).copy_(value.toTensor());
  return result;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const std::vector<IValue> given(stack->end() - static_cast<int64_t>(count), stack->end());
  const int index = device_of_arguments(given);
  const c10::DeviceGuard guard(c10::Device(TYPE, index));

  Stack host;
  std::vector<IValue> mutated;
  bool may_resize = false;
  for (size_t i = 0; i < count; ++i) {
    const auto& formal = schema.arguments()[i];
    const auto* alias = formal.alias_info();
    if (alias && alias->isWrite()) {
      mutated.push_back(given[i]);
      may_resize = may_resize || (given[i].isTensor() && formal.is_out() && !given[i].toTensor().numel());
    }
    const bool is_generator = formal.type()->str() == "Generator?";
    host.push_back(is_generator ? IValue(drawn(given[i], index)) : translate(given[i], argument));
  }
  bool is_fresh = false, waits = must_wait(schema.name());
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "simulated accelerator: no view ", schema.operator_name());
    const auto kind = result.type()->kind();
    is_fresh = is_fresh || !alias;
    waits = waits || (kind != c10::TypeKind::TensorType && !alias);
  }
  torch::jit::drop(*stack, count);
  if (waits && is_fresh) {
    run_now(op, host, index);
    for (const IValue& value : host) {
      stack->push_back(to_device(value, index));
    }
    return;
  }

  // Shapes: a run on zeros, in the caller's thread.
  Stack shapes;
  if (is_fresh || may_resize) {
    for (size_t i = 0; i < count; ++i) {
      shapes.push_back(translate(given[i], dummy));
    }
    CpuKernels kernels;
    op.callBoxed(shapes);
  }
  std::vector<Tensor> fresh; // on the host, over the memory of the results
  size_t next = 0;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info()) {
      const IValue& result = mutated.at(next++);
      if (may_resize && result.isTensor() && result.toTensor().sizes() != shapes[i].toTensor().sizes()) {
        resize_(result.toTensor(), shapes[i].toTensor().sizes(), {});
        host[count - schema.returns().size() + i] = kernel_view(result.toTensor());
      }
      stack->push_back(result);
      fresh.emplace_back();
    } else if (shapes[i].toTensor().defined()) {
      const Tensor result = empty_as(shapes[i].toTensor(), index);
      stack->push_back(result);
      fresh.push_back(kernel_view(result));
    } else {
      stack->push_back(Tensor());
      fresh.emplace_back();
    }
  }
  launch(index, [op, host, fresh]() mutable {
    op.callBoxed(host);
    for (size_t i = 0; i < fresh.size(); ++i) {
      if (fresh[i].defined()) {
        fresh[i].copy_(host[i].toTensor());
      }
    }
  });
}

void wait_for(int waiting, int other) {
  auto event = std::make_shared<Event>();
  Event::record(event, current_queue(other));
  Event::block(event, current_queue(waiting));
}

// As cudaMemcpyAsync: asynchronous between devices and with pinned memory; copies from pageable memory are
// staged, copies to it wait.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!target.numel()) {
    return target;
  }
  const Tensor from = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  const int index = on_device(source) ? source.device().index() : target.device().index();
  Queue& queue = current_queue(index);
  if (!on_device(source)) {
    const bool pinned = pinned_allocator().is_pinned(source.const_data_ptr());
    const Tensor host = pinned ? wrapped(from, const_cast<void*>(from.const_data_ptr())) : host_copy(from);
    launch(index, [to = kernel_view(target), host] { to.copy_(host); });
    if (pinned) {
      pinned_allocator().use(source.const_data_ptr(), queue);
    }
    if (!non_blocking) {
      synchronize(queue, index);
    }
    return target;
  }
  if (!on_device(target)) {
    counters().add(DEVICE_TO_HOST);
    const bool pinned = pinned_allocator().is_pinned(target.const_data_ptr());
    launch(index, [to = wrapped(target, target.data_ptr()), host = kernel_view(from)] { to.copy_(host); });
    if (pinned) {
      pinned_allocator().use(target.const_data_ptr(), queue);
    }
    if (!pinned || !non_blocking) {
      synchronize(queue, index);
    }
    return target;
  }
  const int other = target.device().index();
  if (other != index) {
    wait_for(index, other);
  }
  launch(index, [to = kernel_view(target), host = kernel_view(from)] { to.copy_(host); });
  if (other != index) {
    wait_for(other, index);
  }
  return target;
}
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  counters().add(DEVICE_TO_HOST);
  synchronize(current_queue(self.device().index()), self.device().index());
  return kernel_view(self).item();
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) {
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  }
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

void record_stream(Tensor& self, at::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  const auto run = [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                    output_padding = output_padding.vec()](const Tensor& x, const Tensor& w,
                                                           const std::optional<Tensor>& b) {
    return at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups);
  };
  const bool has_bias = bias && bias->defined();
  const std::optional<Tensor> none;
  const Tensor result = empty_as([&] {
    CpuKernels kernels;
    return run(dummy(input), dummy(weight), has_bias ? std::optional<Tensor>(dummy(*bias)) : none);
  }(), input.device().index());
  launch(input.device().index(),
         [=, x = kernel_view(input), w = kernel_view(weight), to = kernel_view(result),
          b = has_bias ? std::optional<Tensor>(kernel_view(*bias)) : none] { to.copy_(run(x, w, b)); });
  return result;
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const int index = input.device().index();
  const auto result = [&](bool wanted, IntArrayRef size) {
    return wanted ? at::empty(size, input.options()) : Tensor();
  };
  const int64_t channels = gradient.size(1);
  const Tensor to_input = result(mask[0], input.sizes()), to_weight = result(mask[1], weight.sizes()),
               to_bias = result(mask[2], {channels});
  const auto host = [](const Tensor& one) { return one.defined() ? kernel_view(one) : one; };
  launch(index, [=, g = kernel_view(gradient), x = kernel_view(input), w = kernel_view(weight),
                 stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                 output_padding = output_padding.vec(),
                 to = std::array<Tensor, 3>{host(to_input), host(to_weight), host(to_bias)}] {
    auto [a, b, c] = at::convolution_backward(g, x, w, IntArrayRef{channels}, stride, padding, dilation,
                                              transposed, output_padding, groups, mask);
    const std::array<Tensor, 3> found{a, b, c};
    for (int i = 0; i < 3; ++i) {
      if (to[i].defined()) {
        to[i].copy_(found[i]);
      }
    }
  });
  return {to_input, to_weight, to_bias};
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                        bool, std::optional<double>, bool) {
  return 0; // SDPBackend::math, which consists of other operators
}

const bool registered = [] {
  c10::SetAllocator(TYPE, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", plain_attention);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

} // namespace
} // namespace simulated
