// A device whose memory is the CPU's and whose manners are those of CUDA.
//
// Every operator runs on the CPU, after two things are refused that CUDA refuses: tensors of two devices, and
// a generator of the CPU. A lookup out of range leaves the device unusable, as an assertion in a kernel does.

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::IntArrayRef;
using Stack = torch::jit::Stack;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device HERE(KIND, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// ---------------------------------------------------------------------------- one device with one stream

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};
Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// -------------------------------------------------------------------------- tensors, views and copies

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& x) {
  if (x.device().is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), at::dtype(x.scalar_type()));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (to.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& x) { return at::native::_local_scalar_dense_cpu(on_cpu(x)); }

Tensor& set_storage(Tensor& x, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(x, storage, offset, size, stride);
}

Tensor& set_tensor(Tensor& x, const Tensor& source) { return at::cpu::set_(x, source); }

// Attention by plain products and a softmax, whose operators are seen one by one.
int64_t attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return 0;
}

// ------------------------------------------------------------------------------- every other operator

std::string asserted;

bool is_elsewhere(const c10::IValue& value) {
  if (value.isTensor()) {
    const Tensor& x = value.toTensor();
    // a number of the CPU goes with any device
    return x.defined() && x.dim() > 0 && x.device().type() != KIND && !x.is_meta();
  }
  if (!value.isList()) return false;
  for (const c10::IValue& entry : value.toListRef())
    if (is_elsewhere(entry)) return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const std::string name = op.schema().operator_name().name;
  TORCH_CHECK(asserted.empty(), "device-side assert triggered by ", asserted);
  const size_t count = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  const bool takes_indices = name.find("aten::index") == 0 || name.find("aten::_index") == 0;
  for (size_t i = 0; i < count; i++) {
    const bool is_indices = takes_indices && i == 1;
    TORCH_CHECK(is_indices || !is_elsewhere(given[i]), "Expected all tensors to be on the same device: ", name);
    TORCH_CHECK(!given[i].isGenerator() || given[i].toGenerator().device().type() == KIND,
                "Expected a generator of the device: ", name);
  }
  try {
    at::native::cpu_fallback(op, stack);
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    if (what.find("out of range") != std::string::npos || what.find("out of bounds") != std::string::npos)
      asserted = name;
    throw;
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("resize_", at::native::resize_);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_fused_sdp_choice", attention);
}

// Autocast with torch's own lists of what runs in low precision and what in float32.
using namespace at::autocast;
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(WIDE)
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
