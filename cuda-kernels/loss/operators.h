// Declarations that torch.cpp and torch_gradient.cpp share.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "torch/checks.h"
#include "torch/rows.h"

namespace kernel_twins {

// The dimension of the classes: the second one, or the only one.
inline int64_t class_dim(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

inline std::vector<c10::SymInt> row_shape(const Tensor& input) {
  const auto sizes = input.sym_sizes();
  std::vector<c10::SymInt> shape(sizes.begin(), sizes.end());
  shape.erase(shape.begin() + class_dim(input));
  return shape;
}

// `wide`: PyTorch will compute, which also accepts float64.
void check(const Tensor& input, const Tensor& target, int64_t reduction, double label_smoothing, bool wide);

// (loss, lse, scale): the loss of each row or of all, and what the backward pass needs: each row's
// log(sum(exp(logits))), and the weight of a row's loss in the total, which is empty without a total.
using Losses = std::tuple<Tensor, Tensor, Tensor>;

// With fp32_loss the loss is float32, otherwise it has the input's dtype.
Losses cross_entropy_cuda(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                          double label_smoothing, bool fp32_loss);
Losses cross_entropy_cpu(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                         double label_smoothing, bool fp32_loss);
Losses cross_entropy_meta(const Tensor& input, const Tensor& target, int64_t, int64_t reduction,
                          double label_smoothing, bool fp32_loss);

// The gradient in PyTorch operations, which can be differentiated again. It computes lse and scale anew,
// since these depend on the input, too.
Tensor cross_entropy_backward_aten(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   int64_t ignore_index, int64_t reduction, double label_smoothing);

// Calls the backward operator through the dispatcher, at the next key.
Tensor call_cross_entropy_backward(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   const Tensor& lse, const Tensor& scale, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing);

}  // namespace kernel_twins
