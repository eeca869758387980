// out = softmax(scale * q @ k^T + mask) @ v for every head of a batch, and the logarithm of each row's sum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/head_strides.h"
#include "lib/step.h"

// Query i sees the keys from i + first to i + last. Without a limit these lie beyond every key: first is -Sq
// or less, last is Sk or more.
struct Band {
  int64_t first, last;
};

struct AttentionArgs {
  const void* q;  // [B, H, Sq, D]
  const void* k;  // [B, H_KV, Sk, D]; query head h reads head h / (H / H_KV)
  const void* v;  // [B, H_KV, Sk, D]
  void* out;      // [B, H, Sq, D], contiguous; rows that see no key are 0
  float* lse;     // [B, H, Sq], contiguous: natural logarithm of a row's sum; -inf where it sees no key
  int64_t B, H, H_KV, Sq, Sk, D;
  HeadStrides q_stride, k_stride, v_stride;
  float scale;  // of either sign
  Band band;
  Dtype dtype;  // of q, k, v and out: bf16 or fp16
  // What v14 alone serves. With sequences B is 1, and Sq and Sk are the tokens of all.
  HeadStrides out_stride;
  float softcap = 0.0f;  // scores become softcap * tanh(score / softcap); 0: they stay
  const int *starts_q = nullptr, *starts_k = nullptr;
  int64_t sequences = 0;
  bool from_end = false;  // adds Sk - Sq to the band's limits
  const Memory* memory;
  cudaStream_t stream;
};

extern const StepTable<AttentionArgs> attention_steps;
