// Attention's scores in PyTorch operations, for the operators on a CPU.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>

#include "operators.h"

namespace kernel_twins {

// [end - begin, Sk], true where one of these queries does not see a key.
inline Tensor hidden_pairs(const Tensor& q, const Tensor& k, const OptionalTensor& cu_seqlens_q,
                           const OptionalTensor& cu_seqlens_k, const AttentionOptions& options, int64_t begin,
                           int64_t end) {
  const auto index = q.options().dtype(at::kLong);
  const Tensor places = at::arange(begin, end, index);
  const Tensor keys = at::arange(k.size(2), index);
  const auto outside_band = [&](const Tensor& own) {
    const Tensor distance = keys - own.unsqueeze(1);
    return (distance < options.first).logical_or(distance > options.last);
  };
  if (!cu_seqlens_q) return outside_band(places + (options.from_end ? k.size(2) - q.size(2) : 0));
  const Tensor starts = cu_seqlens_q->to(at::kLong), key_starts = cu_seqlens_k->to(at::kLong);
  const Tensor sequence = at::bucketize(places, starts.slice(0, 1), /*out_int32=*/false, /*right=*/true)
                              .clamp_max(starts.size(0) - 2);
  const auto of = [&](const Tensor& each, int64_t next) { return each.index_select(0, sequence + next); };
  const Tensor first_key = of(key_starts, 0), key_end = of(key_starts, 1);
  Tensor own = first_key + places - of(starts, 0);
  if (options.from_end) own = own + (key_end - first_key) - (of(starts, 1) - of(starts, 0));
  const Tensor elsewhere = (keys < first_key.unsqueeze(1)).logical_or(keys >= key_end.unsqueeze(1));
  const Tensor in_none = (places < starts[0]).logical_or(places >= starts[-1]);
  return outside_band(own).logical_or(elsewhere).logical_or(in_none.unsqueeze(1));
}

// The scores of scaled queries, and the softcap's slope there (undefined without one).
inline std::pair<Tensor, Tensor> scores_of(const Tensor& scaled_q, const Tensor& k, double softcap) {
  const Tensor scores = at::matmul(scaled_q, k.mT());
  if (softcap == 0) return {scores, Tensor()};
  const Tensor t = at::tanh(scores / softcap);
  return {softcap * t, 1 - t.square()};
}

// The tensor with 0 where a token is in no sequence, so that nothing there spreads by 0 * NaN.
inline Tensor cleared(const Tensor& heads, const OptionalTensor& starts) {
  if (!starts) return heads;
  const Tensor places = at::arange(heads.size(2), heads.options().dtype(at::kLong));
  const Tensor in_none = (places < (*starts)[0]).logical_or(places >= (*starts)[-1]);
  return heads.masked_fill(in_none.unsqueeze(1), 0);
}

}  // namespace kernel_twins
