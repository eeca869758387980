// The steps of attention.
#include <ATen/ATen.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention/args.h"
#include "torch/steps.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

HeadStrides strides_of(const Tensor& tensor) {
  return {.batch = tensor.stride(0), .head = tensor.stride(1), .row = tensor.stride(2)};
}

void attention_step(const std::string& step, const Tensor& q, const Tensor& k, const Tensor& v,
                    const std::vector<Tensor>& out, std::optional<double> scale,
                    std::optional<std::pair<int64_t, int64_t>> band) {
  const c10::cuda::CUDAGuard guard(q.device());
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  const auto [first, last] = band.value_or(std::pair(-q.size(2), k.size(2)));  // all
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(find_step("attention", attention_steps, step, q), {.q = q.const_data_ptr(),
                                                                   .k = k.const_data_ptr(),
                                                                   .v = v.const_data_ptr(),
                                                                   .out = out[0].mutable_data_ptr(),
                                                                   .lse = out[1].mutable_data_ptr<float>(),
                                                                   .B = q.size(0),
                                                                   .H = q.size(1),
                                                                   .H_KV = k.size(1),
                                                                   .Sq = q.size(2),
                                                                   .Sk = k.size(2),
                                                                   .D = q.size(3),
                                                                   .q_stride = strides_of(q),
                                                                   .k_stride = strides_of(k),
                                                                   .v_stride = strides_of(v),
                                                                   .scale = static_cast<float>(factor),
                                                                   .band = {.first = first, .last = last},
                                                                   .dtype = dtype_of(q),
                                                                   .memory = &memory,
                                                                   .stream = lender.stream()});
  for (const Tensor& each : out) mark_written(each);
}

}  // namespace

void register_attention(pybind11::module_& module) {
  define_steps(
      module, "attention", attention_step,
      "out = softmax(scale * q @ k^T) @ v. q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], bf16 or fp16; out: [B, "
      "H, Sq, D] and the rows' logarithms, fp32 [B, H, Sq]. Query i sees keys i + band[0] to i + band[1].",
      arg("q"), arg("k"), arg("v"), kw_only(), arg("out"), arg("scale") = pybind11::none(),
      arg("band") = pybind11::none());
}
