// Operators: the few that need to know the device's memory, and for all others the CPU's kernels on that memory.
#include "operators.h"
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace sim {

at::Generator& inner_generator(const at::Generator& generator); // memory.cpp

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_sim(tensor)) return tensor;
  c10::Storage held = tensor.storage();
  char* start = static_cast<char*>(device_view(held.data()));
  auto view = at::from_blob(
      start ? start + tensor.storage_offset() * int64_t(tensor.itemsize()) : nullptr, tensor.sizes(), tensor.strides(),
      [held](void*) {}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

namespace {

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(at::Device(kSim)));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kSim)));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// -- copies

// The same dtype and shape, laid out alike without gaps: one copy of bytes.
bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes().equals(from.sizes()) &&
      to.strides().equals(from.strides()) && to.is_non_overlapping_and_dense() && !to.is_neg() && !from.is_neg() &&
      !to.is_conj() && !from.is_conj();
}

void copy_bytes(const at::Tensor& sim_tensor, const at::Tensor& to, const at::Tensor& from, bool asynchronous) {
  const auto stream = current_stream(sim_tensor.device().index());
  c10::Storage to_storage = to.storage(), from_storage = from.storage();
  void* target = on_host(to).data_ptr();
  const void* source = on_host(from).data_ptr();
  const size_t num_bytes = to.nbytes();
  if (is_sim(to)) note_write(stream, to.storage().data());
  else note_read(stream, from.storage().data(), "a copy to the host");
  if (asynchronous) {
    ++counters().asynchronous_copies;
    enqueue(stream, [to_storage, from_storage, target, source, num_bytes] {
      wait_for_copy();
      std::memcpy(target, source, num_bytes);
    });
  } else {
    note_synchronization();
    finish(stream);
    note_host_waited(stream);
    if (num_bytes) std::memcpy(target, source, num_bytes);
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  at::Tensor from = source.sizes().equals(self.sizes()) ? source : source.expand(self.sizes());
  if (is_sim(self) && is_sim(from)) {
    ++counters().device_to_device;
    note_read(current_stream(self.device().index()), from.storage().data(), "a copy on the device");
    note_write(current_stream(self.device().index()), self.storage().data());
    finish(current_stream(self.device().index()));
    if (self.device() != from.device()) finish(current_stream(from.device().index()));
    on_host(self).copy_(on_host(from));
    return self;
  }
  const at::Tensor& device_tensor = is_sim(self) ? self : from;
  const c10::DeviceGuard guard(device_tensor.device());
  if (is_sim(self)) {
    ++counters().host_to_device;
    if (is_plain(self, from)) {
      const bool pinned = is_pinned(from.data_ptr());
      if (non_blocking && !pinned) {
        copy_bytes(self, self, from.clone(), true); // staged by the driver when the call is made
      } else {
        copy_bytes(self, self, from, non_blocking && pinned);
      }
    } else {
      note_synchronization();
      finish(current_stream(self.device().index()));
      on_host(self).copy_(from);
    }
    return self;
  }
  ++counters().device_to_host;
  if (is_plain(self, from)) {
    copy_bytes(from, self, from, non_blocking && is_pinned(self.data_ptr()));
  } else {
    note_synchronization();
    finish(current_stream(from.device().index()));
    self.copy_(on_host(from));
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  return copy_(to, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::Tensor to = target;
  to.resize_(self.sizes());
  return copy_(to, self, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  ++counters().scalars_read;
  note_synchronization();
  note_read(current_stream(self.device().index()), self.storage().data(), "item()");
  finish(current_stream(self.device().index()));
  note_host_waited(current_stream(self.device().index()));
  return on_host(self).item();
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const int64_t count = int64_t(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kSim)->allocate(0), c10::GetAllocator(kSim), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes().equals(size) && !format) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = size_t(impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() && needed > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    finish(current_stream(self.device().index()));
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::impl::VirtualGuardImpl(kSim).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

bool is_pinned_tensor(const at::Tensor&, std::optional<at::Device>) {
  return false;
}

int64_t choose_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return int64_t(at::SDPBackend::math);
}

// -- all others

at::Tensor to_device(const at::Tensor& result, c10::Device device) {
  if (!result.defined() || is_sim(result)) return result;
  const auto host = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  auto moved = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, device, {});
  if (host.numel()) {
    finish(current_stream(device.index()));
    std::memcpy(device_view(moved.data_ptr()), host.data_ptr(), host.nbytes());
    note_write(current_stream(device.index()), moved.storage().data());
  }
  return moved;
}

struct Call {
  std::optional<c10::Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> written; // of the device, and the CPU's tensor that a kernel fills

  void see(const c10::OperatorHandle& op, const at::Tensor& tensor) {
    if (!is_sim(tensor)) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(
        *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", tensor.device(), "! (", op.schema().name(), ")");
  }
  void check_host(const c10::OperatorHandle& op, const at::Tensor& tensor, bool takes_indices) {
    if (!tensor.defined() || is_sim(tensor) || tensor.dim() == 0 || takes_indices || tensor.numel() == 0) return;
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
        tensor.device(), "! (", op.schema().name(), ")");
  }
  at::Tensor view(const at::Tensor& tensor, bool is_written, bool is_out, const std::string& reader) {
    if (!is_sim(tensor)) return tensor;
    const auto stream = current_stream(tensor.device().index());
    if (!is_out && !reader.empty()) note_read(stream, tensor.storage().data(), reader);
    if (is_written) note_write(stream, tensor.storage().data());
    if (is_out || (is_written && tensor.storage().nbytes() == 0)) { // a kernel gives it a size
      auto host = at::empty({0}, tensor.options().device(at::kCPU));
      written.emplace_back(tensor, host);
      return host;
    }
    return on_host(tensor);
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  const size_t count = formal.size();
  const size_t first = stack->size() - count;
  const bool takes_indices = schema.name().find("index") != std::string::npos;
  Call call;
  std::vector<c10::IValue> given(stack->begin() + long(first), stack->end());
  for (const auto& value : given) {
    if (value.isTensor()) call.see(op, value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) call.see(op, tensor);
    if (value.isOptionalTensorList())
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor) call.see(op, *tensor);
    if (value.isDevice() && !call.device && value.toDevice().type() == kSim) call.device = value.toDevice();
  }
  if (!call.device || !call.device->has_index()) call.device = c10::Device(kSim, current_device());
  const c10::DeviceGuard guard(*call.device);
  ++counters().kernels;
  finish(current_stream(call.device->index()));

  // Who takes a view reads nothing yet.
  const auto& returned = schema.returns();
  const bool is_view = !returned.empty() && std::all_of(returned.begin(), returned.end(), [](const auto& one) {
    return one.alias_info() && !one.alias_info()->isWrite();
  });
  const std::string reader = is_view ? "" : schema.name();
  for (size_t i = 0; i < count; ++i) {
    const auto& value = given[i];
    const bool is_written = formal[i].alias_info() && formal[i].alias_info()->isWrite();
    const bool is_out = is_written && formal[i].kwarg_only();
    c10::IValue& slot = (*stack)[first + i];
    if (value.isTensor()) {
      call.check_host(op, value.toTensor(), takes_indices);
      slot = call.view(value.toTensor(), is_written, is_out, reader);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        call.check_host(op, tensor, takes_indices);
        views.push_back(call.view(tensor, is_written, is_out, reader));
      }
      slot = views;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const auto& tensor : value.toOptionalTensorVector())
        views.push_back(tensor ? std::optional<at::Tensor>(call.view(*tensor, is_written, is_out, reader)) : std::nullopt);
      slot = views;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      slot = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      if (value.toGenerator().device().type() == kSim) slot = inner_generator(value.toGenerator());
    } else if (value.isNone() && formal[i].name() == "generator") {
      slot = inner_generator(at::detail::getPrivateUse1Hooks().getDefaultGenerator(call.device->index()));
    }
  }

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (auto& [target, host] : call.written) {
    target.resize_(host.sizes());
    on_host(target).copy_(host);
  }
  const size_t num_returns = schema.returns().size();
  const size_t start = stack->size() - num_returns;
  for (size_t i = 0; i < num_returns; ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    c10::IValue& slot = (*stack)[start + i];
    const c10::IValue* original = nullptr;
    if (alias)
      for (size_t j = 0; j < count; ++j)
        if (formal[j].alias_info() && formal[j].alias_info()->beforeSets() == alias->beforeSets()) original = &given[j];
    if (original && alias->isWrite()) {
      slot = *original;
    } else if (slot.isTensor()) {
      const auto result = slot.toTensor();
      if (original && original->isTensor() && is_sim(original->toTensor()) && result.defined()) { // a view
        const auto& base = original->toTensor();
        const auto* bytes = static_cast<const char*>(device_view(base.storage().data()));
        const auto offset = (static_cast<const char*>(result.data_ptr()) - bytes) / long(result.itemsize());
        auto view = result.scalar_type() == base.scalar_type() ? base : base.view(result.scalar_type());
        slot = at::native::as_strided_tensorimpl(view, result.sizes(), result.strides(), offset);
      } else {
        slot = to_device(result, *call.device);
      }
    } else if (slot.isTensorList()) {
      c10::List<at::Tensor> moved;
      for (const at::Tensor& tensor : slot.toTensorVector()) moved.push_back(to_device(tensor, *call.device));
      slot = moved;
    }
  }
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage", TORCH_FN(set_source));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("is_pinned", TORCH_FN(is_pinned_tensor));
  m.impl("_fused_sdp_choice", TORCH_FN(choose_attention));
}

// -- autocast

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}


} // namespace sim

namespace at::autocast {
namespace {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}
} // namespace
} // namespace at::autocast
