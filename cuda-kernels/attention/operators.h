// Shared by attention's operators, forward and backward.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "torch/checks.h"
#include "torch/launch.h"

namespace kernel_twins {

// The operators' arguments that are no tensors, in the order of their schema. Query i sees the keys from
// i + first to i + last; from_end adds its sequence's keys - queries to both. A softcap of 0 is none.
struct AttentionOptions {
  std::optional<double> scale;  // without: 1 / sqrt(D)
  int64_t first, last;
  bool from_end;
  double softcap;
  bool deterministic;  // concerns the gradient
};

using Results = std::tuple<Tensor, Tensor>;            // out, lse
using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of q, k and v

// The gradients that a call wants. The others have no elements: an operator must return tensors.
struct Wanted {
  bool q, k, v;
};

double scale_of(const AttentionOptions& options, const Tensor& q);

// q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D]. With cu_seqlens B is 1, and Sq and Sk are the tokens of all
// sequences. `wide`: PyTorch computes, which takes fp32 and float64, too.
void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, bool wide);

// The tensor, or a copy if its rows are no neighbours of elements that start at multiples of 16 bytes.
Tensor aligned(const Tensor& heads);

// An empty tensor of that shape. Its heads and rows lie in the same order, one after the other.
Tensor empty_heads(const Tensor& like);
Tensor empty_heads_meta(const Tensor& like);

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Calls the backward operator through the dispatcher, at the next key.
Gradients call_attention_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                                  const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                                  const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                  std::optional<double> scale, int64_t first, int64_t last, bool from_end,
                                  double softcap, bool deterministic, bool q_grad, bool k_grad, bool v_grad);

}  // namespace kernel_twins
