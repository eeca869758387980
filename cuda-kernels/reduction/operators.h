// Axes and kinds of the operators over any axes of a tensor: parsing, checks, result sizes. The counterpart
// in C++ of kernel_twins/ops/reduction/reduction_nd.py's checks.
#pragma once

#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>

#include <bitset>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reduction/reduction_nd/args.h"
#include "reduction/reduction_nd/merged_axes.h"
#include "torch/checks.h"
#include "torch/launch.h"

namespace kernel_twins {

using Reduced = std::bitset<64>;  // by axis; PyTorch allows 64

inline ReductionKind reduction_kind_of(std::string_view name) {
  constexpr std::pair<std::string_view, ReductionKind> NAMES[] = {{"sum", ReductionKind::sum},
                                                                  {"mean", ReductionKind::mean},
                                                                  {"max", ReductionKind::max},
                                                                  {"argmax", ReductionKind::argmax}};
  for (const auto& [known, kind] : NAMES) {
    if (name == known) return kind;
  }
  TORCH_CHECK_VALUE(false, "kind is '", std::string(name), "', must be one of sum, mean, max, argmax");
}

// The reduced axes of a call. A 0-d tensor has one axis of one element, as in PyTorch.
inline Reduced reduced_of(at::IntArrayRef dims, int64_t rank) {
  const int64_t axes = std::max(rank, int64_t{1});
  Reduced reduced;
  for (const int64_t dim : dims) {
    TORCH_CHECK_INDEX(-axes <= dim && dim < axes, "dims is ", tuple(dims), ", each must be from ",
                      text(-axes), " to ", text(axes - 1), ": x has ", text(rank), " dimensions");
    const int64_t axis = dim < 0 ? dim + axes : dim;
    TORCH_CHECK_VALUE(!reduced[axis], "dims is ", tuple(dims), ", must name no axis twice");
    reduced[axis] = true;
  }
  return reduced;
}

// As in PyTorch: the maximum of no elements is an error, even if there are no outputs.
template <typename Int>
void require_elements(at::ArrayRef<Int> sizes, Reduced reduced, ReductionKind kind) {
  if (kind != ReductionKind::max && kind != ReductionKind::argmax) return;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    // While a graph is traced, an unbacked size is unknown and passes; the traced call checks it again.
    const bool is_empty = reduced[axis] && TORCH_GUARD_OR_FALSE(c10::sym_eq(sizes[axis], 0));
    TORCH_CHECK_INDEX(!is_empty, "x has shape ", tuple(sizes), ", must have elements along dims for ",
                      kind == ReductionKind::max ? "max" : "argmax");
  }
}

template <typename Int>
std::vector<Int> reduced_sizes(at::ArrayRef<Int> sizes, Reduced reduced, bool keepdim) {
  std::vector<Int> kept;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (!reduced[axis]) {
      kept.push_back(sizes[axis]);
    } else if (keepdim) {
      kept.push_back(Int(1));
    }
  }
  return kept;
}

// The launcher's arguments. x has at most MOST_AXES dimensions.
inline ReductionNdArgs reduction_args(const Tensor& x, const Tensor& out, Reduced reduced, ReductionKind kind,
                                      const Memory& memory, cudaStream_t stream) {
  const int rank = static_cast<int>(x.dim());
  bool is_reduced[MOST_AXES];
  for (int axis = 0; axis < rank; ++axis) is_reduced[axis] = reduced[axis];
  const auto axes = [&](bool which, bool ordered) {
    return axes_of(rank, x.sizes().data(), x.strides().data(), is_reduced, which, ordered);
  };
  return {.x = x.const_data_ptr(),
          .out = out.mutable_data_ptr(),
          .kept = axes(false, true),
          .reduced = axes(true, kind == ReductionKind::argmax),
          .kind = kind,
          .dtype = dtype_of(x),
          .memory = &memory,
          .stream = stream};
}

}  // namespace kernel_twins
