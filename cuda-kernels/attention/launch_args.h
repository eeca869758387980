// What a launcher of attention is told, from tensors: for the steps, and for the operators.
#pragma once

#include <ATen/ATen.h>

#include "attention/attention/args.h"
#include "attention/attention_backward/args.h"
#include "torch/launch.h"

namespace kernel_twins {

inline HeadStrides strides_of(const at::Tensor& heads) {
  return {.batch = heads.stride(0), .head = heads.stride(1), .row = heads.stride(2)};
}

inline const int* starts_of(const OptionalTensor& cu_seqlens) {
  return cu_seqlens ? cu_seqlens->const_data_ptr<int>() : nullptr;
}

// All but the memory and the stream. The tensors must outlive the launch.
inline AttentionArgs args_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                             const at::Tensor& out, const at::Tensor& lse, double scale, Band band,
                             double softcap, bool from_end) {
  return {.q = q.const_data_ptr(),
          .k = k.const_data_ptr(),
          .v = v.const_data_ptr(),
          .out = out.mutable_data_ptr(),
          .lse = lse.mutable_data_ptr<float>(),
          .B = q.size(0),
          .H = q.size(1),
          .H_KV = k.size(1),
          .Sq = q.size(2),
          .Sk = k.size(2),
          .D = q.size(3),
          .q_stride = strides_of(q),
          .k_stride = strides_of(k),
          .v_stride = strides_of(v),
          .scale = static_cast<float>(scale),
          .band = band,
          .dtype = dtype_of(q),
          .out_stride = strides_of(out),
          .softcap = static_cast<float>(softcap),
          .starts_q = starts_of(cu_seqlens_q),
          .starts_k = starts_of(cu_seqlens_k),
          .sequences = cu_seqlens_q ? cu_seqlens_q->numel() - 1 : 0,
          .from_end = from_end,
          .memory = nullptr,
          .stream = nullptr};
}

// Likewise. A gradient that is not wanted is undefined.
inline AttentionBackwardArgs backward_args_of(const at::Tensor& dout, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& v,
                                              const at::Tensor& result, const at::Tensor& lse,
                                              const OptionalTensor& dlse, const OptionalTensor& cu_seqlens_q,
                                              const OptionalTensor& cu_seqlens_k, const at::Tensor& dq,
                                              const at::Tensor& dk, const at::Tensor& dv, double scale,
                                              Band band, double softcap, bool from_end, bool deterministic) {
  const auto data = [](const at::Tensor& gradient) {
    return gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  };
  const auto strides = [](const at::Tensor& gradient) {
    return gradient.defined() ? strides_of(gradient) : HeadStrides{};
  };
  return {.dout = dout.const_data_ptr(),
          .q = q.const_data_ptr(),
          .k = k.const_data_ptr(),
          .v = v.const_data_ptr(),
          .result = result.const_data_ptr(),
          .lse = lse.const_data_ptr<float>(),
          .dlse = dlse ? dlse->const_data_ptr<float>() : nullptr,
          .dq = data(dq),
          .dk = data(dk),
          .dv = data(dv),
          .B = q.size(0),
          .H = q.size(1),
          .H_KV = k.size(1),
          .Sq = q.size(2),
          .Sk = k.size(2),
          .D = q.size(3),
          .dout_stride = strides_of(dout),
          .q_stride = strides_of(q),
          .k_stride = strides_of(k),
          .v_stride = strides_of(v),
          .result_stride = strides_of(result),
          .scale = static_cast<float>(scale),
          .band = band,
          .dtype = dtype_of(q),
          .dq_stride = strides(dq),
          .dk_stride = strides(dk),
          .dv_stride = strides(dv),
          .softcap = static_cast<float>(softcap),
          .starts_q = starts_of(cu_seqlens_q),
          .starts_k = starts_of(cu_seqlens_k),
          .sequences = cu_seqlens_q ? cu_seqlens_q->numel() - 1 : 0,
          .from_end = from_end,
          .deterministic = deterministic,
          .memory = nullptr,
          .stream = nullptr};
}

}  // namespace kernel_twins
