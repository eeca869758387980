// Shared by the norms' operators, forward and backward.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "torch/checks.h"
#include "torch/rows.h"

namespace kernel_twins {

using Shape = c10::SymIntArrayRef;

// Which of the two norms an operator is of.
struct LayerNorm {
  static constexpr bool CENTERED = true;
};
struct RmsNorm {
  static constexpr bool CENTERED = false;
};

inline void require_shape_of(const char* name, const Tensor& tensor, const char* like_name, Shape shape) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == shape, name, " has shape ", tuple(tensor.sym_sizes()),
                    ", must have that of ", like_name, ", ", tuple(shape));
}

inline std::optional<Rows> rows_or_none(const OptionalTensor& tensor, int64_t dim) {
  return tensor ? std::optional<Rows>(std::in_place, *tensor, dim, tensor->dim() - dim) : std::nullopt;
}

inline std::vector<int64_t> last(int64_t dims) {
  std::vector<int64_t> found(dims);
  std::iota(found.begin(), found.end(), -dims);
  return found;
}

// Mean (undefined for rms_norm) and rstd in fp32 or fp64, the rows' dimensions kept, in operations that can
// be differentiated.
template <typename Norm>
std::pair<Tensor, Tensor> statistics(const Tensor& x, int64_t dims, double eps);

// A gradient that is not wanted has no elements: an operator must return tensors.
struct Gradients {
  Tensor dx, dweight, dbias;
};

// In operations that can be differentiated again; mean and rstd as `statistics` returns them.
template <typename Norm>
Gradients backward_aten(const Tensor& dout, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& dadded, int64_t dims, bool x_grad,
                        bool weight_grad, bool bias_grad);

// The backward operator, whatever is next in the dispatcher's order.
template <typename Norm>
Gradients call_backward(const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& dadded, bool x_grad,
                        bool weight_grad, bool bias_grad);

}  // namespace kernel_twins
