// The steps of attention and attention_backward.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch_args.h"
#include "torch/steps.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

void attention_step(const std::string& step, const Tensor& q, const Tensor& k, const Tensor& v,
                    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
                    const std::vector<Tensor>& out, std::optional<double> scale,
                    std::optional<std::pair<int64_t, int64_t>> band, std::optional<double> softcap,
                    bool from_end) {
  const c10::cuda::CUDAGuard guard(q.device());
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  const int64_t most = std::max(q.size(2), k.size(2));
  const auto [first, last] = band.value_or(std::pair(-most, most));  // all
  const Step<AttentionArgs>& found = find_step("attention", attention_steps, step, q);
  const char* last_step = attention_steps.end[-1].name;
  TORCH_CHECK_VALUE(step == last_step || !(softcap || from_end || cu_seqlens_q), step,
                    " serves no softcap, from_end or cu_seqlens_q: take ", last_step);
  const auto behind = reinterpret_cast<uintptr_t>(out[0].const_data_ptr()) % 16;
  TORCH_CHECK_VALUE(behind == 0 || std::string(found.arch) != "==9.0a", "out[0] starts ", behind,
                    " bytes past a multiple of 16, must start at one for ", step,
                    ": allocate it anew, or take an earlier step");
  Lender lender;
  const Memory memory = lender.memory();
  AttentionArgs args = args_of(q, k, v, cu_seqlens_q, cu_seqlens_k, out[0], out[1], factor,
                               {.first = first, .last = last}, softcap.value_or(0.0), from_end);
  args.memory = &memory;
  args.stream = lender.stream();
  lender.launch(found, args);
  for (const Tensor& each : out) mark_written(each);
}

// Where there are sequences, what no step writes is cleared first: a token in none has the gradient 0.
void attention_backward_step(const std::string& step, const Tensor& dout, const Tensor& q, const Tensor& k,
                             const Tensor& v, const Tensor& result, const Tensor& lse,
                             const std::optional<Tensor>& dlse, const std::optional<Tensor>& cu_seqlens_q,
                             const std::optional<Tensor>& cu_seqlens_k,
                             const std::vector<std::optional<Tensor>>& out, std::optional<double> scale,
                             std::optional<std::pair<int64_t, int64_t>> band, std::optional<double> softcap,
                             bool from_end, bool deterministic) {
  const c10::cuda::CUDAGuard guard(q.device());
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  const int64_t most = std::max(q.size(2), k.size(2));
  const auto [first, last] = band.value_or(std::pair(-most, most));  // all
  const auto& found = find_step("attention_backward", attention_backward_steps, step, q);
  const char* last_step = attention_backward_steps.end[-1].name;
  const bool all = std::all_of(out.begin(), out.end(), [](const auto& each) { return each.has_value(); });
  TORCH_CHECK_VALUE(
      step == last_step || !(softcap || from_end || deterministic || cu_seqlens_q || !all), step,
      " serves no softcap, from_end, deterministic or cu_seqlens_q, and no None in out: take ", last_step);
  const uintptr_t whole = step == last_step ? 16 : 4;  // bytes that it stores at once, at least
  for (size_t i = 0; i < out.size(); ++i) {
    if (!out[i]) continue;
    const auto behind = reinterpret_cast<uintptr_t>(out[i]->const_data_ptr()) % whole;
    TORCH_CHECK_VALUE(behind == 0 || std::string(found.arch) != "==9.0a", "out[", i, "] starts ", behind,
                      " bytes past a multiple of ", whole, ", must start at one for ", step,
                      ": allocate it anew, or take an earlier step");
    if (cu_seqlens_q) out[i]->zero_();
  }
  const auto gradient = [&](size_t i) { return out[i].value_or(Tensor()); };
  const Tensor dq = gradient(0), dk = gradient(1), dv = gradient(2);
  Lender lender;
  const Memory memory = lender.memory();
  AttentionBackwardArgs args =
      backward_args_of(dout, q, k, v, result, lse, dlse, cu_seqlens_q, cu_seqlens_k, dq, dk, dv, factor,
                       {.first = first, .last = last}, softcap.value_or(0.0), from_end, deterministic);
  args.memory = &memory;
  args.stream = lender.stream();
  lender.launch(found, args);
  for (const auto& each : out) {
    if (each) mark_written(*each);
  }
}

}  // namespace

void register_attention(pybind11::module_& module) {
  define_steps(
      module, "attention", attention_step,
      "out = softmax(scale * q @ k^T) @ v. q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], bf16 or fp16; "
      "out: [B, H, Sq, D] and the rows' logarithms, fp32 [B, H, Sq]. Query i sees keys i + band[0] to "
      "i + band[1]; with from_end Sk - Sq is added to both. The last step takes sequences, too: "
      "cu_seqlens_q and cu_seqlens_k, int32 [N + 1], tell which of a single batch's tokens are "
      "sequence n's.",
      arg("q"), arg("k"), arg("v"), arg("cu_seqlens_q") = pybind11::none(),
      arg("cu_seqlens_k") = pybind11::none(), kw_only(), arg("out"), arg("scale") = pybind11::none(),
      arg("band") = pybind11::none(), arg("softcap") = pybind11::none(), arg("from_end") = false);
  define_steps(module, "attention_backward", attention_backward_step,
               "The gradients of q, k and v through attention. dout, q, result: [B, H, Sq, D], k, v: "
               "[B, H_KV, Sk, D], bf16 or fp16; lse, dlse: fp32 [B, H, Sq]; out: dq, dk, dv. The last step "
               "takes None for one that is not wanted. Band, softcap and sequences are the forward pass's.",
               arg("dout"), arg("q"), arg("k"), arg("v"), arg("result"), arg("lse"),
               arg("dlse") = pybind11::none(), arg("cu_seqlens_q") = pybind11::none(),
               arg("cu_seqlens_k") = pybind11::none(), kw_only(), arg("out"), arg("scale") = pybind11::none(),
               arg("band") = pybind11::none(), arg("softcap") = pybind11::none(), arg("from_end") = false,
               arg("deterministic") = false);
}
