// The steps of all products, and the operator behind kernel_twins.matmul.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "lib/tensor_map.h"
#include "matmul/matmul_bf16/args.h"
#include "matmul/matmul_bf16/configuration.h"
#include "matmul/matmul_fp32/args.h"
#include "matmul/matmul_tf32x3/args.h"
#include "products.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/steps.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

template <typename T>
void launch(const Step<MatmulArgs<T>>& step, const Matrix& a, const Matrix& b, void* out,
            at::ScalarType dtype, at::ScalarType out_dtype) {
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

// -----------------------------------------------------------------------------------------------------------
// Steps
// -----------------------------------------------------------------------------------------------------------

// One adaptor for all products, which differ in their dtypes alone. T as in MatmulArgs.
template <typename T>
void matmul_step(const char* op, const StepTable<MatmulArgs<T>>& steps, const std::string& step,
                 const Tensor& a, const Tensor& b, const Tensor& out) {
  const c10::cuda::CUDAGuard guard(a.device());
  launch(find_step(op, steps, step, a), matrix_of(a), matrix_of(b), out.mutable_data_ptr(), a.scalar_type(),
         out.scalar_type());
  mark_written(out);
}

void matmul_fp32(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul_step("matmul_fp32", matmul_fp32_steps, step, a, b, out);
}

void matmul_tf32x3(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul_step("matmul_tf32x3", matmul_tf32x3_steps, step, a, b, out);
}

void matmul_bf16(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul_step("matmul_bf16", matmul_bf16_steps, step, a, b, out);
}

// The last step's tile for a @ b, in words; none where it would not launch a kernel.
std::string configuration(const Tensor& a, const Tensor& b, bool along_k, bool fp32_out) {
  const c10::cuda::CUDAGuard guard(a.device());
  const Matrix left = matrix_of(a);
  const Matrix right = matrix_of(b);
  const auto [least, most] = std::minmax({left.rows, right.cols, left.cols});
  if (least == 0 || most >= LARGEST_SIZE) return "";
  const Dtype dtype = dtype_of(a.scalar_type());
  return matmul_bf16_configuration({.a = left.data,
                                    .b = right.data,
                                    .M = left.rows,
                                    .N = right.cols,
                                    .K = left.cols,
                                    .stride_am = left.stride_row,
                                    .stride_ak = left.stride_col,
                                    .stride_bk = right.stride_row,
                                    .stride_bn = right.stride_col,
                                    .dtype = dtype,
                                    .out_dtype = fp32_out ? Dtype::fp32 : dtype},
                                   along_k);
}

// -----------------------------------------------------------------------------------------------------------
// The operator's arguments
// -----------------------------------------------------------------------------------------------------------

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

// The product's sizes, as torch.matmul reads them: a vector is a row of a, or a column of b.
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

// -----------------------------------------------------------------------------------------------------------
// On the GPU
// -----------------------------------------------------------------------------------------------------------

template <typename T>
void multiply_by(const Step<MatmulArgs<T>>& step, const Matrix& a, const Matrix& b, void* out,
                 at::ScalarType dtype, at::ScalarType out_dtype) {
  TORCH_CHECK_TYPE(step.fp32_out || out_dtype == dtype, "out_dtype is ", dtype_name(out_dtype), ", must be ",
                   dtype_name(dtype), " for ", step.name,
                   ", which this GPU or these sizes call for: pass backend='torch'");
  launch(step, a, b, out, dtype, out_dtype);
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
  // With one b for all products, the batch is more rows of a.
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

// PyTorch's own product, so that code for a GPU can be tried, traced and differentiated without one.
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

class MatmulFunction : public torch::autograd::Function<MatmulFunction> {
 public:
  static constexpr const char* NAME = "MatmulBackward";

  // da = dout @ b.mT, db = a.mT @ dout, in the operands' dtype, and summed over what was broadcast. An
  // operand is saved if the other one needs a gradient.
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
        // With one b for all products, the sum of its gradient over the batch is the product's own.
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
      context.saved_data["sizes"] = (a_grad ? a : b).sym_sizes();  // of the operand that is not saved
    });
  }
  return out;
}

}  // namespace

void kernel_twins::multiply(const Matrix& a, const Matrix& b, void* out, at::ScalarType dtype,
                            at::ScalarType out_dtype, int device) {
  const bool large = std::max({a.rows, b.cols, a.cols}) >= LARGEST_SIZE;
  const int passed_over = large ? FIRST : NONE;
  if (dtype == at::kFloat) {
    multiply_by(first_that_runs<matmul_fp32_steps>("matmul_fp32", device, passed_over), a, b, out, dtype,
                out_dtype);
  } else {
    multiply_by(first_that_runs<matmul_bf16_steps>("matmul_bf16", device, passed_over), a, b, out, dtype,
                out_dtype);
  }
}

Tensor kernel_twins::call_matmul(const Tensor& a, const Tensor& b, OptionalDtype out_dtype) {
  static const auto op = find_operator<decltype(call_matmul)>("kernel_twins::matmul");
  return op.call(a, b, out_dtype);
}

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  library.def("matmul(Tensor a, Tensor b, ScalarType? out_dtype=None) -> Tensor",
              {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) { library.impl("matmul", matmul_cuda); }
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) { library.impl("matmul", matmul_cpu); }
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) { library.impl("matmul", matmul_meta); }
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) { library.impl("matmul", matmul_autograd); }

void register_matmul(pybind11::module_& module) {
  define_steps(module, "matmul_fp32", matmul_fp32,
               "out = a @ b in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous.", arg("a"),
               arg("b"), kw_only(), arg("out"));
  define_steps(module, "matmul_tf32x3", matmul_tf32x3,
               "out = a @ b, fp32 from three TF32 products. a: [M, K], b: [K, N], any strides; out: [M, N], "
               "contiguous.",
               arg("a"), arg("b"), kw_only(), arg("out"));
  define_steps(
      module, "matmul_bf16", matmul_bf16,
      "out = a @ b, summed in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous. a and b "
      "are bf16 or fp16 alike, out is so or fp32.",
      arg("a"), arg("b"), kw_only(), arg("out"));
  module.def(
      "product_configuration", configuration,
      "The tile, and the split of K, of the last step's kernel for a @ b, in words. a: [M, K], b: [K, N], "
      "bf16 or fp16 alike, on a GPU of 9.0; along_k: as linear, which reads both along K; fp32_out: the "
      "result is fp32.",
      arg("a"), arg("b"), kw_only(), arg("along_k") = false, arg("fp32_out") = false);
  define_linear(module);
}
