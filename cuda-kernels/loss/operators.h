// What the two files of cross_entropy's operators share.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "torch/checks.h"
#include "torch/rows.h"

namespace kernel_twins {

// Classes lie along the second dimension, or the only one.
inline int64_t class_dim(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

inline std::vector<c10::SymInt> row_shape(const Tensor& input) {
  const auto sizes = input.sym_sizes();
  std::vector<c10::SymInt> shape(sizes.begin(), sizes.end());
  shape.erase(shape.begin() + class_dim(input));
  return shape;
}

// `wide`: PyTorch computes, which takes float64 too.
void check(const Tensor& input, const Tensor& target, int64_t reduction, double label_smoothing, bool wide);

// The loss of rows or of all; beside it what the backward pass needs: for each row the logarithm of its sum
// of exponentials, and what a row's loss counts in that of all, of no elements where there is none of all.
using Losses = std::tuple<Tensor, Tensor, Tensor>;

// With fp32_loss the loss is float32, else of the input's dtype.
Losses cross_entropy_cuda(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                          double label_smoothing, bool fp32_loss);
Losses cross_entropy_cpu(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                         double label_smoothing, bool fp32_loss);
Losses cross_entropy_meta(const Tensor& input, const Tensor& target, int64_t, int64_t reduction,
                          double label_smoothing, bool fp32_loss);

// In operations that can be differentiated again, and that know nothing of lse and scale, which come from the
// same input and target.
Tensor cross_entropy_backward_aten(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   int64_t ignore_index, int64_t reduction, double label_smoothing);

// The backward operator, whatever is next in the dispatcher's order.
Tensor call_cross_entropy_backward(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   const Tensor& lse, const Tensor& scale, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing);

}  // namespace kernel_twins
