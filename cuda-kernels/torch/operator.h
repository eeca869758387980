// What the operators behind the public functions, torch.ops.kernel_twins.*, share: their results, the step
// that the device runs, other operators.
//
// They are in C++, because a call of an operator written in Python costs several times what its kernel's
// launch does. They allocate their results, differentiate, and run without Python's lock.
//
// Where an operator returns what its backward pass needs as well, as a norm's statistics, the public function
// calls another, <operator>_result, which is composed of it. A tensor that Python has held is freed under
// Python's lock, which PyTorch's backward thread must then take: that costs as much as several launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>

#include <array>
#include <iterator>
#include <optional>
#include <span>
#include <string>

#include "architecture.h"
#include "behind.h"
#include "checks.h"
#include "launch.h"

namespace kernel_twins {

// An operator as a caller sees it: whatever is next in the dispatcher's order is called.
template <typename Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline Tensor empty(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  return Tensor(at::detail::empty_cuda(shape, dtype, device, std::nullopt));
}

// The place, among the steps behind a function, of the one that a call passes over because of its sizes.
constexpr int NONE = -1, FIRST = 0, SECOND = 1;

// The first of the steps behind a function that the device runs, or nullptr. It is remembered by thread and
// table.
template <const auto& STEPS>
auto find_that_runs(const char* op, int device, int passed_over = NONE) {
  struct Found {
    decltype(STEPS.begin) step = nullptr;
    bool known = false;
  };
  thread_local std::array<std::array<Found, C10_COMPILE_TIME_MAX_GPUS>, SECOND - NONE + 1> remembered = {};
  Found& found = remembered[passed_over - NONE][device];
  if (found.known) return found.step;
  const std::span names = behind(op);
  for (int place = 0; !found.step && place < std::ssize(names); ++place) {
    if (place == passed_over) continue;
    const auto step = STEPS.find(names[place]);
    if (architecture_refusal(op, step->name, step->arch, device).empty()) found.step = step;
  }
  found.known = true;
  return found.step;
}

// The same, where there must be one.
template <const auto& STEPS>
const auto& first_that_runs(const char* op, int device, int passed_over = NONE) {
  if (const auto step = find_that_runs<STEPS>(op, device, passed_over)) return *step;
  const std::span names = behind(op);
  std::string refusals;
  for (int place = 0; place < std::ssize(names); ++place) {
    if (place == passed_over) continue;
    const auto step = STEPS.find(names[place]);
    refusals += (refusals.empty() ? "" : "; ") + architecture_refusal(op, step->name, step->arch, device);
  }
  TORCH_CHECK(false, refusals, ": pass backend='torch'");
}

// Of a Meta function's tensor: whether PyTorch would compute, which takes float64 too, as on the CPU. A fake
// tensor is on meta, but has its device's keys.
inline bool is_wide(const Tensor& x) { return !x.key_set().has_backend(c10::BackendComponent::CUDABit); }

}  // namespace kernel_twins
