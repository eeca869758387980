// The operators behind the public functions: torch.ops.kernel_twins.matmul and .linear.
//
// In C++, because a call of an operator written in Python costs several times what its kernel's launch does.
// They allocate their results, differentiate, and run without Python's lock.
//
// Where an operator returns what its backward pass needs as well, as a norm's statistics, the public function
// calls another, <operator>_result, which is composed of it. A tensor that Python has held is freed under
// Python's lock, which PyTorch's backward thread must then take: that costs as much as several launches.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lib/tensor_map.h"
#include "matmul/linear/args.h"
#include "matmul/matmul_bf16/args.h"
#include "matmul/matmul_fp32/args.h"
#include "torch/activation.h"
#include "torch/adaptor.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"

namespace {

using at::Tensor;
using namespace kernel_twins;
using OptionalDtype = std::optional<at::ScalarType>;

// The dtype of the result; refuses dtypes, ranks and devices that do not go together. `wide`:
// PyTorch computes, which takes float64 too.
at::ScalarType check_operands(const Tensor& a, const Tensor& b, OptionalDtype out_dtype, bool wide) {
  const auto check = [&](const char* name, const Tensor& tensor) {
    if (!(wide && tensor.scalar_type() == at::kDouble)) {
      require_dtype(name, tensor, {at::kFloat, at::kBFloat16, at::kHalf});
    }
    TORCH_CHECK_VALUE(tensor.dim() > 0, name,
                      " has 0 dimensions, must have 1 or more: multiply by it with *");
  };
  check("a", a);
  check("b", b);
  require_same_dtype("b", b, "a", a);
  require_same_device("b", b, "a", a);
  const at::ScalarType given = a.scalar_type();
  const at::ScalarType out = out_dtype.value_or(given);
  const bool half = given == at::kBFloat16 || given == at::kHalf;
  TORCH_CHECK_TYPE(out == given || (half && out == at::kFloat), "out_dtype is ", dtype_name(out),
                   ", must be ", dtype_name(given), half ? " or torch.float32" : "",
                   ": leave it out, and convert the result with .to(...)");
  return out;
}

// What the sizes come to, as torch.matmul reads them: a vector is a row of a, or a column of b.
template <typename Int>
struct Shape {
  Int M, N, K;
  std::vector<Int> batch;  // broadcast
  std::vector<Int> out;
};

template <typename Int>
Shape<Int> shape_of(at::ArrayRef<Int> a, at::ArrayRef<Int> b) {
  const bool a_vector = a.size() == 1;
  const bool b_vector = b.size() == 1;
  Shape<Int> shape = {a_vector ? Int(1) : a[a.size() - 2], b_vector ? Int(1) : b.back(), a.back(), {}, {}};
  const Int& rows = b_vector ? b[0] : b[b.size() - 2];
  TORCH_CHECK_VALUE(rows == shape.K, "b has shape ", tuple(b), ", must have ", text(shape.K),
                    b_vector ? " elements" : " rows", ", as many as a, of shape ", tuple(a), ", has ",
                    a_vector ? "elements" : "columns", ": transpose a matrix with .mT, or slice one");
  const auto a_batch = a_vector ? a.slice(0, 0) : a.slice(0, a.size() - 2);
  const auto b_batch = b_vector ? b.slice(0, 0) : b.slice(0, b.size() - 2);
  const size_t dims = std::max(a_batch.size(), b_batch.size());
  for (size_t i = 0; i < dims; ++i) {
    const auto size = [&](at::ArrayRef<Int> batch) {
      return i + batch.size() < dims ? Int(1) : batch[i + batch.size() - dims];
    };
    const Int of_a = size(a_batch);
    const Int of_b = size(b_batch);
    TORCH_CHECK_VALUE(of_a == 1 || of_b == 1 || of_a == of_b, "b has leading dimensions ", tuple(b_batch),
                      ", must broadcast with a's, ", tuple(a_batch),
                      ": the last ones are matched first, and each pair must be equal or hold a 1");
    shape.batch.push_back(of_a == 1 ? of_b : of_a);
  }
  shape.out = shape.batch;
  if (!a_vector) shape.out.push_back(shape.M);
  if (!b_vector) shape.out.push_back(shape.N);
  return shape;
}

// A matrix in a tensor's memory.
struct Matrix {
  const char* data;
  int64_t rows, cols, stride_row, stride_col;
};

// The last two dimensions.
Matrix matrix_of(const Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.size(-2), tensor.size(-1),
          tensor.stride(-2), tensor.stride(-1)};
}

template <typename T>
void launch(const Step<MatmulArgs<T>>& step, const Matrix& a, const Matrix& b, void* out,
            at::ScalarType dtype, at::ScalarType out_dtype) {
  TORCH_CHECK_TYPE(step.fp32_out || out_dtype == dtype, "out_dtype is ", dtype_name(out_dtype), ", must be ",
                   dtype_name(dtype), " for ", step.name,
                   ", which this GPU or these sizes call for: pass backend='torch'");
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(step, {.a = reinterpret_cast<const T*>(a.data),
                       .b = reinterpret_cast<const T*>(b.data),
                       .out = static_cast<T*>(out),
                       .M = a.rows,
                       .N = b.cols,
                       .K = a.cols,
                       .stride_am = a.stride_row,
                       .stride_ak = a.stride_col,
                       .stride_bk = b.stride_row,
                       .stride_bn = b.stride_col,
                       .dtype = dtype_of(dtype),
                       .out_dtype = dtype_of(out_dtype),
                       .memory = &memory,
                       .stream = lender.stream()});
}

// out = a @ b, on the current stream of the current device.
void multiply(const Matrix& a, const Matrix& b, void* out, at::ScalarType dtype, at::ScalarType out_dtype,
              int device) {
  const bool large = std::max({a.rows, b.cols, a.cols}) >= LARGEST_SIZE;
  if (dtype == at::kFloat) {
    const auto& step =
        large ? first_that_runs<matmul_fp32_steps>("matmul_fp32", {"v09_pipelined"}, true, device)
              : first_that_runs<matmul_fp32_steps>("matmul_fp32", {"v12_short_loop", "v09_pipelined"}, false,
                                                   device);
    launch(step, a, b, out, dtype, out_dtype);
  } else {
    const auto& step = large
                           ? first_that_runs<matmul_bf16_steps>("matmul_bf16", {"v05_grouped"}, true, device)
                           : first_that_runs<matmul_bf16_steps>(
                                 "matmul_bf16", {"v15_dispatch", "v05_grouped"}, false, device);
    launch(step, a, b, out, dtype, out_dtype);
  }
}

// Whether products of a batch run one after the other: where each has a tile of 128 x 256 for every SM and
// enough to do to hide the next launch. cuBLAS takes smaller ones all at once.
bool worth_a_launch_each(int64_t M, int64_t N, int64_t K, int device) {
  int sms = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return ((M + 127) / 128) * ((N + 255) / 256) >= sms && K >= 1024;
}

Tensor matmul_batched(const Tensor& a, const Tensor& b, at::ScalarType out_dtype) {
  const Shape<int64_t> shape = shape_of(a.sizes(), b.sizes());
  const auto [M, N, K, batch, out_shape] = shape;
  const int device = a.get_device();
  Tensor out = empty(out_shape, out_dtype, a.device());
  if (out.numel() == 0) return out;
  if (K == 0) return out.zero_();
  const Tensor a_rows = a.dim() == 1 ? a.unsqueeze(0) : a;
  const Tensor b_cols = b.dim() == 1 ? b.unsqueeze(1) : b;
  // One b for all: the batch is more rows of a.
  if (b_cols.numel() == K * N) {
    const Tensor rows = a_rows.reshape({-1, K});
    const Tensor cols = b_cols.reshape({K, N});
    multiply(matrix_of(rows), matrix_of(cols), out.mutable_data_ptr(), a.scalar_type(), out_dtype, device);
    return out;
  }

  const auto expanded = [&](const Tensor& tensor) {
    std::vector<int64_t> to = batch;
    to.insert(to.end(), {tensor.size(-2), tensor.size(-1)});
    return tensor.expand(to);
  };
  const Tensor all_a = expanded(a_rows);
  const Tensor all_b = expanded(b_cols);
  const int64_t count = out.numel() / (M * N);
  if (!worth_a_launch_each(M, N, K, device)) {
    Tensor matrices = out.view({count, M, N});
    const Tensor left = all_a.reshape({count, M, K});
    const Tensor right = all_b.reshape({count, K, N});
    if (out_dtype == a.scalar_type()) {
      at::bmm_outf(left, right, matrices);
    } else {
      at::bmm_outf(left, right, out_dtype, matrices);
    }
    return out;
  }
  Matrix left = matrix_of(all_a);
  Matrix right = matrix_of(all_b);
  const char* first_left = left.data;
  const char* first_right = right.data;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    int64_t of_a = 0;
    int64_t of_b = 0;
    for (int64_t dim = static_cast<int64_t>(batch.size()) - 1; dim >= 0; --dim) {
      of_a += rest % batch[dim] * all_a.stride(dim);
      of_b += rest % batch[dim] * all_b.stride(dim);
      rest /= batch[dim];
    }
    left.data = first_left + of_a * a.itemsize();
    right.data = first_right + of_b * b.itemsize();
    multiply(left, right, to + i * M * N * out.itemsize(), a.scalar_type(), out_dtype, device);
  }
  return out;
}

Tensor matmul_cuda(const Tensor& a, const Tensor& b, OptionalDtype out_dtype) {
  const at::ScalarType type = check_operands(a, b, out_dtype, false);
  const c10::cuda::CUDAGuard guard(a.device());
  if (a.dim() != 2 || b.dim() != 2) return matmul_batched(a, b, type);
  if (a.size(1) != b.size(0)) shape_of(a.sizes(), b.sizes());  // refuses them
  Tensor out = empty({a.size(0), b.size(1)}, type, a.device());
  multiply(matrix_of(a), matrix_of(b), out.mutable_data_ptr(), a.scalar_type(), type, a.get_device());
  return out;
}

// PyTorch's own product: what was written for a GPU can be tried, traced and differentiated without one.
Tensor matmul_cpu(const Tensor& a, const Tensor& b, OptionalDtype out_dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType type = check_operands(a, b, out_dtype, true);
  shape_of(a.sizes(), b.sizes());
  return at::matmul(a.to(type), b.to(type)).contiguous();
}

Tensor matmul_meta(const Tensor& a, const Tensor& b, OptionalDtype out_dtype) {
  const at::ScalarType type = check_operands(a, b, out_dtype, is_wide(a));
  return at::empty_symint(shape_of(a.sym_sizes(), b.sym_sizes()).out, a.options().dtype(type));
}

Tensor call_matmul(const Tensor& a, const Tensor& b, OptionalDtype out_dtype) {
  static const auto op = find_operator<decltype(call_matmul)>("kernel_twins::matmul");
  return op.call(a, b, out_dtype);
}

// All rows, of whatever dimensions. PyTorch's flatten is refused by is_grads_batched.
Tensor as_matrix(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  const auto sizes = tensor.sym_sizes();
  return tensor.reshape_symint({c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()});
}

class MatmulFunction : public torch::autograd::Function<MatmulFunction> {
 public:
  static constexpr const char* NAME = "MatmulBackward";

  // da = dout @ b.mT, db = a.mT @ dout, in the operands' dtype, and summed over what was broadcast. An
  // operand is there where the other wants a gradient.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {Tensor(), Tensor()};
    const auto saved = context->get_saved_variables();
    const Tensor& a = saved[0];
    const Tensor& b = saved[1];
    Tensor dout = gradients[0].to((a.defined() ? a : b).scalar_type());
    const bool a_grad = context->needs_input_grad(0);
    const bool b_grad = context->needs_input_grad(1);
    const auto may_be_matrix = [](const Tensor& operand) { return !operand.defined() || operand.dim() == 2; };
    if (context->saved_data.empty() && may_be_matrix(a) && may_be_matrix(b)) {
      return {a_grad ? call_matmul(dout, b.mT(), std::nullopt) : Tensor(),
              b_grad ? call_matmul(a.mT(), dout, std::nullopt) : Tensor()};
    }

    const auto sizes_of = [&](const Tensor& operand) {
      return operand.defined() ? operand.sym_sizes().vec() : context->saved_data["sizes"].toSymIntVector();
    };
    const Sizes a_sizes = sizes_of(a);
    const Sizes b_sizes = sizes_of(b);
    const bool a_vector = a_sizes.size() == 1;
    const bool b_vector = b_sizes.size() == 1;
    if (b_vector) dout = dout.unsqueeze(-1);
    if (a_vector) dout = dout.unsqueeze(-2);
    Tensor da;
    Tensor db;
    if (a_grad) {
      const Tensor b_cols = b_vector ? b.unsqueeze(1) : b;
      const Sizes rows = a_vector ? Sizes{1, a_sizes[0]} : a_sizes;
      da = at::sum_to(call_matmul(dout, b_cols.mT(), std::nullopt), rows).view_symint(a_sizes);
    }
    if (b_grad) {
      const Tensor a_rows = a_vector ? a.unsqueeze(0) : a;
      const Sizes cols = b_vector ? Sizes{b_sizes[0], 1} : b_sizes;
      if (cols.size() == 2 && a_rows.dim() > 2) {
        // One b for all: its gradient's sum over the batch is the product's own.
        db = call_matmul(as_matrix(a_rows).mT(), as_matrix(dout), std::nullopt);
      } else {
        db = at::sum_to(call_matmul(a_rows.mT(), dout, std::nullopt), cols);
      }
      db = db.view_symint(b_sizes);
    }
    return {da, db};
  }

 private:
  using Sizes = std::vector<c10::SymInt>;
};

Tensor matmul_autograd(const Tensor& a, const Tensor& b, OptionalDtype out_dtype) {
  const Tensor out = below_autograd("matmul", {&a, &b}, [&] { return call_matmul(a, b, out_dtype); });
  if (compute_requires_grad(a, b)) {
    record<MatmulFunction>({&a, &b}, {&out}, [&](AutogradContext& context) {
      const bool a_grad = a.requires_grad();
      const bool b_grad = b.requires_grad();
      context.save_for_backward({b_grad ? a : Tensor(), a_grad ? b : Tensor()});
      if ((a_grad && b_grad) || (a.dim() == 2 && b.dim() == 2)) return;
      context.saved_data["sizes"] = (a_grad ? a : b).sym_sizes();  // of the one that is not there
    });
  }
  return out;
}

// -----------------------------------------------------------------------------------------------------------
// linear: activation(x @ weight.T + bias)
// -----------------------------------------------------------------------------------------------------------

using OptionalTensor = std::optional<Tensor>;

// Whether the backward pass needs what the activation was applied to.
bool needs_pre(Activation activation) {
  return activation != Activation::none && activation != Activation::relu;
}

template <typename Int>
std::vector<Int> linear_shape(at::ArrayRef<Int> x, at::ArrayRef<Int> weight) {
  TORCH_CHECK_VALUE(weight.size() == 2, "weight has ", text(static_cast<int64_t>(weight.size())),
                    " dimensions, must have 2");
  TORCH_CHECK_VALUE(weight[1] == x.back(), "weight has shape ", tuple(weight), ", must have ", text(x.back()),
                    " columns, as many as x, of shape ", tuple(x),
                    ", has in its last dimension: slice one, or "
                    "transpose a matrix with .mT");
  std::vector<Int> shape(x.begin(), x.end());
  shape.back() = weight[0];
  return shape;
}

void check_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool wide) {
  const auto check = [&](const char* name, const Tensor& tensor) {
    if (!(wide && tensor.scalar_type() == at::kDouble)) {
      require_dtype(name, tensor, {at::kFloat, at::kBFloat16, at::kHalf});
    }
    require_same_dtype(name, tensor, "x", x);
    require_same_device(name, tensor, "x", x);
  };
  check("x", x);
  check("weight", weight);
  TORCH_CHECK_VALUE(x.dim() > 0, "x has 0 dimensions, must have 1 or more: call x.unsqueeze(0)");
  linear_shape(x.sym_sizes(), weight.sym_sizes());
  if (!bias) return;
  check("bias", *bias);
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "bias has shape ",
                    tuple(bias->sym_sizes()), ", must have (", text(weight.sym_size(0)),
                    ",): one element for each row of weight");
}

// out, and what the activation was applied to where `save` asks for it (else undefined).
std::pair<Tensor, Tensor> linear_forward_cpu(const Tensor& x, const Tensor& weight,
                                             const OptionalTensor& bias, Activation activation, bool save) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_linear(x, weight, bias, true);
  const Tensor pre = at::linear(x, weight, bias).contiguous();
  return {activated(pre, activation), save ? pre : Tensor()};
}

std::pair<Tensor, Tensor> linear_forward_meta(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias, Activation, bool save) {
  check_linear(x, weight, bias, is_wide(x));
  const auto shape = linear_shape(x.sym_sizes(), weight.sym_sizes());
  return {at::empty_symint(shape, x.options()), save ? at::empty_symint(shape, x.options()) : Tensor()};
}

// The fused step, or nullptr where this GPU does not run it.
const Step<LinearArgs>* fused_step(int device) {
  thread_local std::array<std::optional<const Step<LinearArgs>*>, C10_COMPILE_TIME_MAX_GPUS> known = {};
  auto& found = known[device];
  if (!found) {
    const Step<LinearArgs>* step = linear_steps.find("v01_fused");
    found = architecture_refusal("linear", step->name, step->arch, device).empty() ? step : nullptr;
  }
  return *found;
}

std::pair<Tensor, Tensor> linear_forward_cuda(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias, Activation activation, bool save) {
  check_linear(x, weight, bias, false);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto shape = linear_shape(x.sizes(), weight.sizes());
  const Tensor rows = as_matrix(x);
  const bool large = std::max({rows.size(0), rows.size(1), weight.size(0)}) >= LARGEST_SIZE;
  const Step<LinearArgs>* step =
      large || x.scalar_type() == at::kFloat ? nullptr : fused_step(x.get_device());
  Tensor out = empty(shape, x.scalar_type(), x.device());
  if (!step) {
    if (out.numel() > 0) {
      multiply(matrix_of(rows), matrix_of(weight.t()), out.mutable_data_ptr(), x.scalar_type(),
               x.scalar_type(), x.get_device());
    }
    if (bias) out.add_(*bias);
    return {activated(out, activation), save ? out : Tensor()};
  }
  const Tensor dense_bias = bias ? bias->contiguous() : Tensor();
  Tensor pre = save ? empty(shape, x.scalar_type(), x.device()) : Tensor();
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(*step, {.x = rows.const_data_ptr(),
                        .weight = weight.const_data_ptr(),
                        .bias = bias ? dense_bias.const_data_ptr() : nullptr,
                        .out = out.mutable_data_ptr(),
                        .pre = save ? pre.mutable_data_ptr() : nullptr,
                        .M = rows.size(0),
                        .N = weight.size(0),
                        .K = weight.size(1),
                        .stride_xm = rows.stride(0),
                        .stride_xk = rows.stride(1),
                        .stride_wn = weight.stride(0),
                        .stride_wk = weight.stride(1),
                        .dtype = dtype_of(x),
                        .activation = activation,
                        .memory = &memory,
                        .stream = lender.stream()});
  return {out, pre};
}

template <auto FORWARD>
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              c10::string_view activation) {
  return FORWARD(x, weight, bias, activation_of(activation), false).first;
}

template <auto FORWARD>
std::tuple<Tensor, Tensor> linear_saving(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                         c10::string_view activation) {
  const Activation chosen = activation_of(activation);
  TORCH_CHECK_VALUE(needs_pre(chosen), "activation is '", std::string(activation),
                    "', which saves nothing of its own");
  return FORWARD(x, weight, bias, chosen, true);
}

Activation check_backward(const Tensor& dout, const Tensor& saved, c10::string_view activation) {
  const Activation chosen = activation_of(activation);
  TORCH_CHECK_VALUE(chosen != Activation::none, "activation is 'none', whose dz is dout");
  require_dtype("dout", dout, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  require_same_dtype("saved", saved, "dout", dout);
  require_same_device("saved", saved, "dout", dout);
  TORCH_CHECK_VALUE(dout.dim() > 0 && saved.sym_sizes() == dout.sym_sizes(), "saved has shape ",
                    tuple(saved.sym_sizes()), ", must have that of dout, ", tuple(dout.sym_sizes()));
  return chosen;
}

// dz, and its sum over all rows, by PyTorch's operations.
std::tuple<Tensor, Tensor> linear_backward_aten(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  const Activation chosen = check_backward(dout, saved, activation);
  const Tensor dz = differentiable_dz(dout, saved, chosen).contiguous();
  return {dz, as_matrix(dz).sum(0)};
}

std::tuple<Tensor, Tensor> linear_backward_meta(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  check_backward(dout, saved, activation);
  return {at::empty_symint(dout.sym_sizes(), dout.options()),
          at::empty_symint({dout.sym_size(-1)}, dout.options())};
}

std::tuple<Tensor, Tensor> linear_backward_cuda(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  const Activation chosen = check_backward(dout, saved, activation);
  const bool half = dout.scalar_type() == at::kBFloat16 || dout.scalar_type() == at::kHalf;
  if (!half || dout.numel() == 0 || dout.size(-1) >= LARGEST_SIZE) {
    return linear_backward_aten(dout, saved, activation);
  }
  const c10::cuda::CUDAGuard guard(dout.device());
  const Tensor dense = dout.contiguous();
  const Tensor values = saved.contiguous();
  Tensor dz = at::empty_like(dense);
  Tensor dbias = empty({dout.size(-1)}, dout.scalar_type(), dout.device());
  Lender lender;
  const Memory memory = lender.memory();
  ::linear_backward({.dout = dense.const_data_ptr(),
                     .saved = values.const_data_ptr(),
                     .dz = dz.mutable_data_ptr(),
                     .dbias = dbias.mutable_data_ptr(),
                     .M = dout.numel() / dout.size(-1),
                     .N = dout.size(-1),
                     .dtype = dtype_of(dout),
                     .activation = chosen,
                     .memory = &memory,
                     .stream = lender.stream()});
  return {dz, dbias};
}

Tensor call_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   c10::string_view activation) {
  static const auto op = find_operator<decltype(call_linear)>("kernel_twins::linear");
  return op.call(x, weight, bias, activation);
}

std::tuple<Tensor, Tensor> call_linear_saving(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias, c10::string_view activation) {
  static const auto op = find_operator<decltype(call_linear_saving)>("kernel_twins::linear_saving");
  return op.call(x, weight, bias, activation);
}

std::tuple<Tensor, Tensor> call_linear_backward(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  static const auto op = find_operator<decltype(call_linear_backward)>("kernel_twins::linear_backward");
  return below_autograd("linear_backward", {&dout}, [&] { return op.call(dout, saved, activation); });
}

// What gelu, gelu_tanh or silu was applied to is an output of the node beside the result. Where a gradient is
// differentiated again, it is through that output that x, weight and bias are reached, saved or not.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static constexpr const char* NAME = "LinearBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto kept = context->get_saved_variables();
    const Tensor& x = kept[0];
    const Tensor& weight = kept[1];
    const std::string& activation = context->saved_data["activation"].toStringRef();
    Tensor dz = gradients[0];
    Tensor dbias;
    if (dz.defined() && activation != "none") {
      if (at::GradMode::is_enabled()) {
        dz = differentiable_dz(dz, kept[2], activation_of(activation));
      } else {
        std::tie(dz, dbias) = call_linear_backward(dz, kept[2], activation);
      }
    }
    if (gradients.size() > 1 && gradients[1].defined()) {
      dz = dz.defined() ? dz + gradients[1] : gradients[1];
      dbias = Tensor();
    }
    if (!dz.defined()) return {Tensor(), Tensor(), Tensor()};
    const bool wants_bias = context->needs_input_grad(2);
    if (wants_bias && !dbias.defined()) dbias = dz.sum_to_size_symint({dz.sym_size(-1)});
    Tensor dx;
    Tensor dweight;
    if (context->needs_input_grad(0)) dx = call_matmul(dz, weight, std::nullopt);
    if (context->needs_input_grad(1)) {
      dweight = call_matmul(as_matrix(dz).mT(), as_matrix(x), std::nullopt);
    }
    return {dx, dweight, wants_bias ? dbias : Tensor()};
  }
};

Tensor linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       c10::string_view activation) {
  const Tensors inputs = {&x, &weight, or_none(bias)};
  const auto call = [&] { return call_linear(x, weight, bias, activation); };
  if (!compute_requires_grad(x, weight, bias)) return below_autograd("linear", inputs, call);
  const Activation chosen = activation_of(activation);
  Tensor out, pre;
  if (needs_pre(chosen)) {
    const auto call_saving = [&] { return call_linear_saving(x, weight, bias, activation); };
    std::tie(out, pre) = below_autograd("linear", inputs, call_saving);
  } else {
    out = below_autograd("linear", inputs, call);
  }
  record<LinearFunction>(inputs, {&out, &pre}, [&](AutogradContext& context) {
    context.save_for_backward({weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor(),
                               chosen == Activation::relu ? out : pre});
    context.saved_data["activation"] = std::string(activation);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(kernel_twins, library) {
  library.def("matmul(Tensor a, Tensor b, ScalarType? out_dtype=None) -> Tensor",
              {at::Tag::pt2_compliant_tag});
  library.def("linear(Tensor x, Tensor weight, Tensor? bias=None, str activation='none') -> Tensor",
              {at::Tag::pt2_compliant_tag});
  // What linear's gradient is made of.
  library.def("linear_saving(Tensor x, Tensor weight, Tensor? bias, str activation) -> (Tensor, Tensor)",
              {at::Tag::pt2_compliant_tag});
  library.def("linear_backward(Tensor dout, Tensor saved, str activation) -> (Tensor, Tensor)",
              {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("matmul", matmul_cuda);
  library.impl("linear", linear<linear_forward_cuda>);
  library.impl("linear_saving", linear_saving<linear_forward_cuda>);
  library.impl("linear_backward", linear_backward_cuda);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("matmul", matmul_cpu);
  library.impl("linear", linear<linear_forward_cpu>);
  library.impl("linear_saving", linear_saving<linear_forward_cpu>);
  library.impl("linear_backward", linear_backward_aten);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("matmul", matmul_meta);
  library.impl("linear", linear<linear_forward_meta>);
  library.impl("linear_saving", linear_saving<linear_forward_meta>);
  library.impl("linear_backward", linear_backward_meta);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("matmul", matmul_autograd);
  library.impl("linear", linear_autograd);
  library.impl("linear_saving", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_backward", torch::autograd::autogradNotImplementedFallback());
}
