// A device kind that torch doesn't have: PrivateUse1 over the host's memory, with every operator done by the CPU.
// As little as tensors need to be made, viewed, copied and computed with; no generators, streams or graphs.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>

namespace {

constexpr auto ACME = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
    return {memory, memory, &std::free, c10::Device(ACME, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};

at::ScalarType type_of(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype()));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator, KEYS, type_of(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, KEYS, type_of(dtype));
}

// The same bytes as a tensor of the CPU's.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  void* data = tensor.numel() ? tensor.data_ptr() : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

const at::Tensor& resized(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* made = tensor.unsafeGetTensorImpl();
  made->set_sizes_contiguous(sizes);
  const size_t bytes = (made->storage_offset() + made->numel()) * made->itemsize();
  if (made->storage().nbytes() < bytes) {
    auto* storage = made->storage().unsafeGetStorageImpl();
    storage->set_data_ptr(allocator.allocate(bytes));  // what is resized here is an output: it holds nothing yet
    storage->set_nbytes(bytes);
  }
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resized(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) { return on_host(tensor).item(); }

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

}  // namespace

REGISTER_ALLOCATOR(ACME, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<ACME>);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resized);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}
