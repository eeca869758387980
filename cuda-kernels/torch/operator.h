// Helpers of the operators behind the public functions, torch.ops.kernel_twins.*: allocating results,
// choosing the step that the device runs, calling other operators.
//
// The operators are in C++, because a call of a Python operator costs several times a kernel launch. They
// allocate their results, support autograd, and run without Python's lock.
//
// If an operator also returns what its backward pass needs, such as a norm's statistics, the public function
// calls a second operator, <operator>_result, which is composed of the first. Otherwise Python would hold
// those tensors, and PyTorch's backward thread would have to take Python's lock to free them, at the cost of
// several launches.
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

// Looks up an operator; calling it enters the dispatcher at the next key.
template <typename Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline Tensor empty(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  return Tensor(at::detail::empty_cuda(shape, dtype, device, std::nullopt));
}

// Index, among the steps behind a function, of the step that a call skips because of its sizes.
constexpr int NONE = -1, FIRST = 0, SECOND = 1;

// The first of the steps behind a function that the device runs, or nullptr. Cached by thread and table.
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

// The same, but throws if there is none.
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

// For Meta functions: true if PyTorch would compute x, which accepts float64 as on the CPU. A fake tensor is
// on meta, but has the keys of its real device.
inline bool is_wide(const Tensor& x) { return !x.key_set().has_backend(c10::BackendComponent::CUDABit); }

}  // namespace kernel_twins
