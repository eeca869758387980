// The gradients of q, k and v through attention, from what the forward pass saved.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/attention/args.h"

// With s = scale * q @ k^T, p = exp(s - lse), 0 for a hidden key, and delta = sum(dout * result) - dlse of a
// row: ds = p * (dout @ v^T - delta), dq = scale * ds @ k, dk = scale * ds^T @ q, dv = p^T @ dout.
struct AttentionBackwardArgs {
  const void* dout;    // [B, H, Sq, D]
  const void* q;       // [B, H, Sq, D]
  const void* k;       // [B, H_KV, Sk, D]; query head h reads head h / (H / H_KV)
  const void* v;       // [B, H_KV, Sk, D]; k and v are finite: a hidden key's ds is 0 times numbers of theirs
  const void* result;  // [B, H, Sq, D], of the forward pass
  const float* lse;    // [B, H, Sq], contiguous: natural logarithm of a row's sum; -inf where it sees no key
  const float* dlse;   // [B, H, Sq], contiguous; nullptr for zeros
  void* dq;            // [B, H, Sq, D]; gradients are contiguous before v10
  void* dk;            // [B, H_KV, Sk, D]: the sum over the query heads that read it
  void* dv;            // [B, H_KV, Sk, D]
  int64_t B, H, H_KV, Sq, Sk, D;
  HeadStrides dout_stride, q_stride, k_stride, v_stride, result_stride;
  float scale;  // of either sign
  Band band;
  Dtype dtype;  // of all but lse and dlse: bf16 or fp16
  // What v10 alone serves. With sequences B is 1, and Sq and Sk are the tokens of all. A gradient that is not
  // wanted is nullptr.
  HeadStrides dq_stride, dk_stride, dv_stride;
  float softcap = 0.0f;  // as the forward pass had it
  const int *starts_q = nullptr, *starts_k = nullptr;
  int64_t sequences = 0;
  bool from_end = false;
  bool deterministic = false;  // dq is bit-equal in every run; dk and dv always are
  const Memory* memory;
  cudaStream_t stream;
};

extern const StepTable<AttentionBackwardArgs> attention_backward_steps;
