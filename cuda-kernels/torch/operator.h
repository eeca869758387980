// What operators in several files share: their results, the step that the device runs, other operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>

#include "adaptor.h"

namespace kernel_twins {

// An operator as a caller sees it: whatever is next in the dispatcher's order is called.
template <typename Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline Tensor empty(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  return Tensor(at::detail::empty_cuda(shape, dtype, device, std::nullopt));
}

// The first of a table's steps that the device runs, remembered by thread and table; `large` tells apart the
// problems for which the names are others.
template <const auto& STEPS>
const auto& first_that_runs(const char* op, std::initializer_list<const char*> names, bool large,
                            int device) {
  using Entry = decltype(STEPS.begin);
  thread_local std::array<std::array<Entry, C10_COMPILE_TIME_MAX_GPUS>, 2> known = {};
  Entry& found = known[large][device];
  if (found) return *found;
  std::string refusals;
  for (const char* name : names) {
    const Entry step = STEPS.find(name);
    const std::string refusal = architecture_refusal(op, name, step->arch, device);
    if (refusal.empty()) return *(found = step);
    refusals += (refusals.empty() ? "" : "; ") + refusal;
  }
  TORCH_CHECK(false, refusals, ": pass backend='torch'");
}

// Of a Meta function's tensor: whether PyTorch would compute, which takes float64 too, as on the CPU. A fake
// tensor is on meta, but has its device's keys.
inline bool is_wide(const Tensor& x) { return !x.key_set().has_backend(c10::BackendComponent::CUDABit); }

}  // namespace kernel_twins
