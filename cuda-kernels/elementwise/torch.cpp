// vector_add's steps. It has no public function.
#include "elementwise/vector_add/args.h"
#include "torch/steps.h"

namespace {

using namespace kernel_twins;

void vector_add(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  const c10::cuda::CUDAGuard guard(a.device());
  const auto& found = find_step("vector_add", vector_add_steps, step, a);
  found.launch({.a = a.const_data_ptr(),
                .b = b.const_data_ptr(),
                .out = out.mutable_data_ptr(),
                .n = a.numel(),
                .dtype = dtype_of(a),
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

}  // namespace

void register_elementwise(pybind11::module_& module) {
  define_steps(module, "vector_add", vector_add,
               "out = a + b. Contiguous, of one shape; all fp32, bf16 or fp16. out may be a or b.", arg("a"),
               arg("b"), kw_only(), arg("out"));
}
