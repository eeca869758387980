// The operators behind kernel_twins.layer_norm and kernel_twins.rms_norm.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "norm/layer_norm/args.h"
#include "norm/rms_norm/args.h"
#include "operators.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

// For GPUs without clusters: the longest row, in bytes, that layer_norm's second step there holds in
// registers. The third step reads longer ones again.
constexpr int64_t ROW_IN_REGISTERS = 64 * 1024;

template <typename Norm>
const Step<NormArgs>& forward_step(int64_t bytes, int device) {
  if (!Norm::CENTERED) return first_that_runs<rms_norm_steps>("rms_norm", device);
  return first_that_runs<layer_norm_steps>("layer_norm", device, bytes > ROW_IN_REGISTERS ? SECOND : NONE);
}

// Checks the arguments; returns how many dimensions precede the normalised ones. `wide`: PyTorch computes,
// which takes float64, too.
int64_t check(const Tensor& x, const OptionalTensor& residual, Shape shape, const OptionalTensor& weight,
              const OptionalTensor& bias, bool wide) {
  if (!(wide && x.scalar_type() == at::kDouble)) {
    require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  TORCH_CHECK_VALUE(!shape.empty(),
                    "normalized_shape is (), must hold 1 or more sizes: those of x's last dimensions");
  const int64_t leading = x.dim() - static_cast<int64_t>(shape.size());
  TORCH_CHECK_VALUE(leading >= 0 && x.sym_sizes().slice(leading) == shape, "normalized_shape is ",
                    tuple(shape), ", must hold the sizes of x's last dimensions: x has shape ",
                    tuple(x.sym_sizes()));
  if (residual) {
    require_like("residual", *residual, "x", x);
    require_shape_of("residual", *residual, "x", x.sym_sizes());
  }
  for (const auto& [name, tensor] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}}) {
    if (!*tensor) continue;
    require_like(name, **tensor, "x", x);
    require_shape_of(name, **tensor, "normalized_shape", shape);
  }
  return leading;
}

// Undefined where there is none: `added` without a residual, `mean` of rms_norm.
struct Normed {
  Tensor y, added, mean, rstd;
};

using Forward = Normed(const Tensor& x, const OptionalTensor& residual, Shape shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps);

template <typename Norm>
Normed forward_cuda(const Tensor& x, const OptionalTensor& residual, Shape shape,
                    const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const int64_t leading = check(x, residual, shape, weight, bias, false);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::IntArrayRef sizes = x.sizes();
  const int64_t M = c10::multiply_integers(sizes.slice(0, leading));
  const int64_t N = c10::multiply_integers(sizes.slice(leading));
  Normed out;
  out.y = empty(sizes, x.scalar_type(), x.device());
  if (residual) out.added = empty(sizes, x.scalar_type(), x.device());
  if (Norm::CENTERED) out.mean = empty(sizes.slice(0, leading), at::kFloat, x.device());
  out.rstd = empty(sizes.slice(0, leading), at::kFloat, x.device());
  if (x.numel() == 0) {  // the mean of nothing
    out.rstd.fill_(std::numeric_limits<float>::quiet_NaN());
    if (Norm::CENTERED) out.mean.copy_(out.rstd);
    return out;
  }
  const Rows rows(x, leading, x.dim() - leading);
  const auto residual_rows = rows_or_none(residual, leading);
  const Tensor scale = contiguous_or_none(weight);
  const Tensor shift = contiguous_or_none(bias);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(forward_step<Norm>(N * x.itemsize(), x.get_device()),
                {.x = rows.data(),
                 .residual = residual_rows ? residual_rows->data() : nullptr,
                 .weight = data_or_null(scale),
                 .bias = data_or_null(shift),
                 .out = out.y.mutable_data_ptr(),
                 .added = residual ? out.added.mutable_data_ptr() : nullptr,
                 .mean = Norm::CENTERED ? out.mean.template mutable_data_ptr<float>() : nullptr,
                 .rstd = out.rstd.mutable_data_ptr<float>(),
                 .M = M,
                 .N = N,
                 .stride_xm = rows.stride(),
                 .stride_rm = residual_rows ? residual_rows->stride() : 0,
                 .dtype = dtype_of(x),
                 .eps = static_cast<float>(eps),
                 .memory = &memory,
                 .stream = lender.stream()});
  return out;
}

// PyTorch's own operations, so that code for a GPU can be tried, traced and differentiated without one.
template <typename Norm>
Normed forward_cpu(const Tensor& x, const OptionalTensor& residual, Shape shape, const OptionalTensor& weight,
                   const OptionalTensor& bias, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t leading = check(x, residual, shape, weight, bias, true);
  const Tensor added = residual ? (x + *residual).contiguous() : Tensor();
  const Tensor& row = residual ? added : x;
  const Tensor y = Norm::CENTERED ? at::layer_norm_symint(row, shape, weight, bias, eps)
                                  : at::rms_norm_symint(row, shape, weight, eps);
  const auto [mean, rstd] = statistics<Norm>(row, x.dim() - leading, eps);
  const at::IntArrayRef stats = x.sizes().slice(0, leading);
  return {y.contiguous(), added, Norm::CENTERED ? mean.reshape(stats) : Tensor(), rstd.reshape(stats)};
}

template <typename Norm>
Normed forward_meta(const Tensor& x, const OptionalTensor& residual, Shape shape,
                    const OptionalTensor& weight, const OptionalTensor& bias, double) {
  const int64_t leading = check(x, residual, shape, weight, bias, is_wide(x));
  const auto like_x = [&] { return at::empty_symint(x.sym_sizes(), x.options()); };
  const auto like_rows = [&] {
    const auto wide = x.options().dtype(at::toOpMathType(x.scalar_type()));
    return at::empty_symint(x.sym_sizes().slice(0, leading), wide);
  };
  return {like_x(), residual ? like_x() : Tensor(), Norm::CENTERED ? like_rows() : Tensor(), like_rows()};
}

// The four operators, by one function that takes missing operands as none.
template <Forward FORWARD>
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, Shape shape, const OptionalTensor& weight,
                                              const OptionalTensor& bias, double eps) {
  const Normed out = FORWARD(x, std::nullopt, shape, weight, bias, eps);
  return {out.y, out.mean, out.rstd};
}
template <Forward FORWARD>
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          Shape shape, const OptionalTensor& weight,
                                                          const OptionalTensor& bias, double eps) {
  const Normed out = FORWARD(x, residual, shape, weight, bias, eps);
  return {out.y, out.added, out.mean, out.rstd};
}
template <Forward FORWARD>
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, Shape shape, const OptionalTensor& weight, double eps) {
  const Normed out = FORWARD(x, std::nullopt, shape, weight, std::nullopt, eps);
  return {out.y, out.rstd};
}
template <Forward FORWARD>
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, Shape shape,
                                                const OptionalTensor& weight, double eps) {
  const Normed out = FORWARD(x, residual, shape, weight, std::nullopt, eps);
  return {out.y, out.added, out.rstd};
}

// Calls the operator that is next in the dispatcher's order.
template <typename Norm>
Normed call(const Tensor& x, const OptionalTensor& residual, Shape shape, const OptionalTensor& weight,
            const OptionalTensor& bias, double eps) {
  Normed out;
  if constexpr (Norm::CENTERED) {
    if (residual) {
      static const auto op =
          find_operator<decltype(add_layer_norm<call<Norm>>)>("kernel_twins::add_layer_norm");
      std::tie(out.y, out.added, out.mean, out.rstd) = op.call(x, *residual, shape, weight, bias, eps);
    } else {
      static const auto op = find_operator<decltype(layer_norm<call<Norm>>)>("kernel_twins::layer_norm");
      std::tie(out.y, out.mean, out.rstd) = op.call(x, shape, weight, bias, eps);
    }
  } else {
    if (residual) {
      static const auto op = find_operator<decltype(add_rms_norm<call<Norm>>)>("kernel_twins::add_rms_norm");
      std::tie(out.y, out.added, out.rstd) = op.call(x, *residual, shape, weight, eps);
    } else {
      static const auto op = find_operator<decltype(rms_norm<call<Norm>>)>("kernel_twins::rms_norm");
      std::tie(out.y, out.rstd) = op.call(x, shape, weight, eps);
    }
  }
  return out;
}

// The public functions' results, and nothing else; see torch/operator.h.
Tensor layer_norm_result(const Tensor& x, Shape shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps) {
  return call<LayerNorm>(x, std::nullopt, shape, weight, bias, eps).y;
}
std::tuple<Tensor, Tensor> add_layer_norm_result(const Tensor& x, const Tensor& residual, Shape shape,
                                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                                 double eps) {
  const Normed out = call<LayerNorm>(x, residual, shape, weight, bias, eps);
  return {out.y, out.added};
}
Tensor rms_norm_result(const Tensor& x, Shape shape, const OptionalTensor& weight, double eps) {
  return call<RmsNorm>(x, std::nullopt, shape, weight, std::nullopt, eps).y;
}
std::tuple<Tensor, Tensor> add_rms_norm_result(const Tensor& x, const Tensor& residual, Shape shape,
                                               const OptionalTensor& weight, double eps) {
  const Normed out = call<RmsNorm>(x, residual, shape, weight, std::nullopt, eps);
  return {out.y, out.added};
}

// -----------------------------------------------------------------------------------------------------------
// Gradients and autocast
// -----------------------------------------------------------------------------------------------------------

template <typename Norm>
class NormFunction : public torch::autograd::Function<NormFunction<Norm>> {
 public:
  static constexpr const char* NAME = Norm::CENTERED ? "LayerNormBackward" : "RmsNormBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& dy = gradients[0];
    const OptionalTensor dadded =
        gradients.size() > 1 && gradients[1].defined() ? OptionalTensor(gradients[1]) : std::nullopt;
    const bool x_grad = context->needs_input_grad(0) || context->needs_input_grad(1);  // or residual's
    Gradients out;
    if (dy.defined()) {
      const auto saved = context->get_saved_variables();
      const Tensor& x = saved[0];
      const OptionalTensor weight = saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
      const bool weight_grad = context->needs_input_grad(2);
      const bool bias_grad = context->needs_input_grad(3);
      if (at::GradMode::is_enabled()) {
        const int64_t dims = x.dim() - saved[2].dim();
        const auto [mean, rstd] = statistics<Norm>(x, dims, context->saved_data["eps"].toDouble());
        out = backward_aten<Norm>(dy, x, mean, rstd, weight, dadded, dims, x_grad, weight_grad, bias_grad);
      } else {
        const OptionalTensor mean = Norm::CENTERED ? OptionalTensor(saved[1]) : std::nullopt;
        out = call_backward<Norm>(dy, x, mean, saved[2], weight, dadded, x_grad, weight_grad, bias_grad);
      }
      if (!x_grad) out.dx = Tensor();
      if (!weight_grad) out.dweight = Tensor();
      if (!bias_grad) out.dbias = Tensor();
    } else if (dadded) {
      out.dx = *dadded;
    }
    return {out.dx, context->needs_input_grad(1) ? out.dx : Tensor(), out.dweight, out.dbias};
  }
};

template <typename Norm>
Normed forward_autograd(const Tensor& x, const OptionalTensor& residual, Shape shape,
                        const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const Tensors inputs = {&x, or_none(residual), or_none(weight), or_none(bias)};
  const Normed out = below_autograd(Norm::CENTERED ? "layer_norm" : "rms_norm", inputs,
                                    [&] { return call<Norm>(x, residual, shape, weight, bias, eps); });
  if (compute_requires_grad(x, residual, weight, bias)) {
    // No gradient flows through the statistics, nor through the sum if neither x nor the residual needs one.
    const Tensor sum = compute_requires_grad(x, residual) ? out.added : Tensor();
    record<NormFunction<Norm>>(inputs, {&out.y, &sum}, [&](AutogradContext& context) {
      context.save_for_backward({residual ? out.added : x, out.mean, out.rstd, *or_none(weight)});
      context.saved_data["eps"] = eps;
    });
  }
  return out;
}

// As PyTorch's layer_norm: on a GPU, half precision is widened, and so is the result. Its rms_norm takes what
// it is given.
Normed forward_autocast(const Tensor& x, const OptionalTensor& residual, Shape shape,
                        const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const auto widened = [](const auto& tensor) {
    return at::autocast::cached_cast(at::kFloat, tensor, c10::DeviceType::CUDA);
  };
  return call<LayerNorm>(widened(x), widened(residual), shape, widened(weight), widened(bias), eps);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  const auto define = [&](const char* schema) { library.def(schema, {at::Tag::pt2_compliant_tag}); };
  define(
      "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor y, Tensor mean, Tensor rstd)");
  define(
      "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps) -> (Tensor y, Tensor added, Tensor mean, Tensor rstd)");
  define(
      "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)");
  define(
      "add_rms_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, float eps) "
      "-> (Tensor y, Tensor added, Tensor rstd)");
  define(
      "layer_norm_result(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
      "-> Tensor y");
  define(
      "add_layer_norm_result(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps) -> (Tensor y, Tensor added)");
  define("rms_norm_result(Tensor x, SymInt[] normalized_shape, Tensor? weight, float eps) -> Tensor y");
  define(
      "add_rms_norm_result(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, float eps) "
      "-> (Tensor y, Tensor added)");
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("layer_norm", layer_norm<forward_cuda<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_cuda<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_cuda<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_cuda<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("layer_norm", layer_norm<forward_cpu<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_cpu<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_cpu<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_cpu<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("layer_norm", layer_norm<forward_meta<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_meta<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_meta<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_meta<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("layer_norm", layer_norm<forward_autograd<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_autograd<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_autograd<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_autograd<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) {
  library.impl("layer_norm", layer_norm<forward_autocast>);
  library.impl("add_layer_norm", add_layer_norm<forward_autocast>);
}
TORCH_LIBRARY_IMPL(kernel_twins, CompositeImplicitAutograd, library) {
  library.impl("layer_norm_result", layer_norm_result);
  library.impl("add_layer_norm_result", add_layer_norm_result);
  library.impl("rms_norm_result", rms_norm_result);
  library.impl("add_rms_norm_result", add_rms_norm_result);
}
TORCH_LIBRARY_IMPL(kernel_twins, FuncTorchBatched, library) {  // or vmap would go example by example
  library.impl("layer_norm_result", layer_norm_result);
  library.impl("add_layer_norm_result", add_layer_norm_result);
  library.impl("rms_norm_result", rms_norm_result);
  library.impl("add_rms_norm_result", add_rms_norm_result);
}
