// Activations and their derivatives on fp32 values.
//
// Each takes a few multiplications and one or two MUFU instructions (ex2.approx, rcp.approx; relative errors
// of about 2^-22). An SM completes an eighth as many of these a cycle as multiplications. tanh.approx would
// be a single one, but 1 + tanh(u) then has 11 correct bits, and none if the sum is small.
#pragma once

#include "activation.h"
#include "common.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float SQRT_HALF = 0.7071067811865476f;
constexpr float TANH_SCALE = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float TANH_CUBIC = 0.044715f;

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-LOG2_E * x)); }

// The upper tail of the normal distribution, P(X > t), for t from 0 to FARTHEST_TAIL, as 2^p(t): one
// exponential and no division. The tail's logarithm is smooth; the polynomial p of degree 6 minimises the
// largest relative error of t * 2^p(t) for t up to 5.5, which is 3e-5. Beyond 5.5 the relative error grows,
// but the result is below 2e-7.
constexpr float FARTHEST_TAIL = 15.0f;  // the tail is negligible beyond
__device__ inline float normal_tail(float t) {
  float p = fmaf(t, 2.52133836e-5f, -6.46586114e-4f);
  p = fmaf(t, p, 7.40630228e-3f);
  p = fmaf(t, p, -5.17569359e-2f);
  p = fmaf(t, p, -0.460578256f);
  p = fmaf(t, p, -1.15047896f);
  return exp2_approx(fmaf(t, p, -1.0000432f));
}

// The normal distribution function P(X < x), for gelu's derivative; `density` is exp(-x^2 / 2). The error is
// below 1e-7: Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26, with halved
// coefficients. normal_tail's error would be a hundred times as large where gelu's slope is 0. The division
// costs no time in kernels that memory limits.
__device__ inline float normal_cdf(float x, float density) {
  const float t = reciprocal_approx(fmaf(0.3275911f * SQRT_HALF, fabsf(x), 1.0f));
  float series = fmaf(t, 0.5307027145f, -0.7265760135f);
  series = fmaf(t, series, 0.7107068705f);
  series = fmaf(t, series, -0.142248368f);
  series = fmaf(t, series, 0.127414796f);
  const float beyond = t * series * density;  // P(X > |x|)
  return x < 0.0f ? beyond : 1.0f - beyond;
}

// gelu's tanh form is x * sigmoid(2 u); this is 2 u.
__device__ inline float twice_tanh_argument(float x) {
  return 2.0f * TANH_SCALE * x * fmaf(TANH_CUBIC * x, x, 1.0f);
}

// The activation of x. gelu and silu of -inf are NaN, as PyTorch's are.
template <Activation ACTIVATION>
__device__ inline float activate(float x) {
  if constexpr (ACTIVATION == Activation::relu) return x < 0.0f ? 0.0f : x;  // NaN stays
  if constexpr (ACTIVATION == Activation::gelu) {
    // x * cdf(x) = max(x, 0) - |x| * tail(|x|). The maximum is computed as (x + |x|) / 2, so that NaN and
    // -inf give NaN.
    const float t = fminf(fabsf(x), FARTHEST_TAIL);
    return fmaf(-t, normal_tail(t), fmaf(0.5f, x, 0.5f * fabsf(x)));
  }
  if constexpr (ACTIVATION == Activation::gelu_tanh) return x * sigmoid(twice_tanh_argument(x));
  if constexpr (ACTIVATION == Activation::silu) return x * sigmoid(x);
  return x;
}

// The derivative at x. For relu, x may also be relu's result.
template <Activation ACTIVATION>
__device__ inline float derivative(float x) {
  if constexpr (ACTIVATION == Activation::relu) return x <= 0.0f ? 0.0f : 1.0f;
  if constexpr (ACTIVATION == Activation::gelu) {
    constexpr float DENSITY_SCALE = 0.3989422804014327f;  // 1 / sqrt(2 pi)
    const float density = exp2_approx(-0.5f * LOG2_E * x * x);
    return fmaf(DENSITY_SCALE * x, density, normal_cdf(x, density));
  }
  if constexpr (ACTIVATION == Activation::gelu_tanh) {
    const float s = sigmoid(twice_tanh_argument(x));
    const float slope = 2.0f * TANH_SCALE * fmaf(3.0f * TANH_CUBIC * x, x, 1.0f);
    return fmaf(x * s * (1.0f - s), slope, s);
  }
  if constexpr (ACTIVATION == Activation::silu) {
    const float s = sigmoid(x);
    return fmaf(x * s, 1.0f - s, s);
  }
  return 1.0f;
}

// Calls function.operator()<ACTIVATION>() with the activation as a template argument, on host or device.
#pragma nv_exec_check_disable
template <typename Function>
__host__ __device__ inline void with_activation(Activation activation, Function function) {
  switch (activation) {
    case Activation::none:
      return function.template operator()<Activation::none>();
    case Activation::relu:
      return function.template operator()<Activation::relu>();
    case Activation::gelu:
      return function.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return function.template operator()<Activation::gelu_tanh>();
    case Activation::silu:
      return function.template operator()<Activation::silu>();
  }
}
