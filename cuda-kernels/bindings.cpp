// kernel_twins._C: one checked function an operation. The only file that knows torch and pybind11.
//
// Each function checks its arguments by the rules and in the words of kernel_twins/ops, looks the step up by
// name, and launches it on the current stream of the tensors' device. Steps write into `out` in place and
// have no gradient.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../hardware-survey/probes.h"
#include "matmul_bf16/args.h"
#include "matmul_fp32/args.h"
#include "matmul_tf32x3/args.h"
#include "reduction/args.h"
#include "step.h"
#include "vector_add/args.h"

#ifndef KERNEL_TWINS_ARCHS
#error "KERNEL_TWINS_ARCHS must name the architectures that the .cu files are compiled for, such as 8.0;9.0a"
#endif

namespace {

using at::Tensor;

// -----------------------------------------------------------------------------------------------------------
// Arguments: the counterpart of kernel_twins/tensors.py
// -----------------------------------------------------------------------------------------------------------

// Messages are put together from strings, and numbers through this: where a compiler links libstdc++
// statically, as some containers' do, streaming a number through torch's macros crashes.
std::string text(int64_t value) { return std::to_string(value); }

// Sizes or strides as Python prints a tuple: (), (5,), (2, 3).
std::string tuple(at::IntArrayRef values) {
  std::string items;
  for (size_t i = 0; i < values.size(); ++i) items += (i ? ", " : "") + text(values[i]);
  return "(" + items + (values.size() == 1 ? ",)" : ")");
}

std::string dtype_name(at::ScalarType dtype) { return py::str(py::cast(dtype)); }

void require_dtype(const char* name, const Tensor& tensor, std::initializer_list<at::ScalarType> accepted) {
  if (std::find(accepted.begin(), accepted.end(), tensor.scalar_type()) != accepted.end()) return;
  std::string names;
  for (at::ScalarType dtype : accepted) names += (names.empty() ? "" : " or ") + dtype_name(dtype);
  TORCH_CHECK_TYPE(false, name, " is ", dtype_name(tensor.scalar_type()), ", must be ", names,
                   ": convert it with ", name, ".to(...)");
}

void require_same_dtype(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), name, " is ",
                   dtype_name(tensor.scalar_type()), ", must be ", dtype_name(other.scalar_type()), " like ",
                   other_name);
}

// What a step reads through a pointer: values that lie in a GPU's memory as they are.
void require_cuda(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cuda(), name, " is on ", tensor.device().str(),
                    ", must be on a CUDA device: call ", name, ".cuda()");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, " has layout ", tensor.layout(),
                    ", must be strided: call ", name, ".to_dense()");
  TORCH_CHECK_VALUE(!tensor.is_neg(), name, " is negated lazily, must hold its values: call ", name,
                    ".resolve_neg()");
}

void require_device(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, " is on ", tensor.device().str(), ", must be on ",
                    like.device().str(), " like ", like_name);
  require_cuda(name, tensor);
}

void require_shape(const char* name, const Tensor& tensor, at::IntArrayRef shape, const char* remedy) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " has shape ", tuple(tensor.sizes()), ", must have ",
                    tuple(shape), ": ", remedy);
}

void require_rank(const char* name, const Tensor& tensor, int64_t rank) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, name, " has ", text(tensor.dim()), " dimensions, must have ",
                    text(rank));
}

void require_contiguous(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " has strides ", tuple(tensor.strides()),
                    ", must be contiguous: call ", name, ".contiguous()");
}

// The first byte of a tensor and the one past its last.
std::pair<uintptr_t, uintptr_t> extent(const Tensor& tensor) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

void require_apart(const Tensor& out, const char* name, const Tensor& input) {
  const auto [out_begin, out_end] = extent(out);
  const auto [begin, end] = extent(input);
  TORCH_CHECK_VALUE(out_end <= begin || end <= out_begin || out_begin == out_end || begin == end,
                    "out overlaps ", name, " in memory, must be apart from it: allocate it with torch.empty");
}

// -----------------------------------------------------------------------------------------------------------
// Architectures
// -----------------------------------------------------------------------------------------------------------

// "9.0a" or "8.0+PTX"; 9.0 is {9, 0}.
struct Architecture {
  std::pair<int, int> capability;
  bool exact = false;  // 9.0a: features of that one architecture, and no other runs it
  bool ptx = false;    // the driver compiles it for any later one
};

Architecture parse_architecture(const std::string& text) {
  char* rest = nullptr;
  const int major = std::strtol(text.c_str(), &rest, 10);
  const int minor = *rest == '.' ? std::strtol(rest + 1, &rest, 10) : 0;
  return {{major, minor}, *rest == 'a', text.find("+PTX") != std::string::npos};
}

// What KERNEL_TWINS_ARCHS lists, which is spelled like TORCH_CUDA_ARCH_LIST.
const std::vector<Architecture>& built_architectures() {
  static const std::vector<Architecture> built = [] {
    std::string list = KERNEL_TWINS_ARCHS;
    std::replace(list.begin(), list.end(), ';', ' ');
    std::istringstream words(list);
    std::vector<Architecture> architectures;
    for (std::string word; words >> word;) architectures.push_back(parse_architecture(word));
    return architectures;
  }();
  return built;
}

// Whether a GPU runs code built for an architecture: code for its generation up to its own number, or any
// PTX.
bool runs(const Architecture& built, std::pair<int, int> gpu) {
  if (built.exact) return built.capability == gpu;
  const bool same_generation = built.capability.first == gpu.first;
  return (same_generation || built.ptx) && built.capability <= gpu;
}

// Whether code for that architecture is what a step's arch (">=9.0", "==9.0a") asks for.
bool satisfies(const std::string& arch, const Architecture& given) {
  const Architecture needed = parse_architecture(arch.substr(2));
  if (arch.substr(0, 2) == "==") return given.capability == needed.capability && given.exact == needed.exact;
  return given.capability >= needed.capability;
}

// Refuses a step that this GPU lacks the instructions for, or whose instructions were left out of this build.
void require_architecture(const std::string& op, const std::string& step, const std::string& arch,
                          int device) {
  int major = 0;
  int minor = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const std::pair<int, int> gpu = {major, minor};
  const bool exact = arch.back() == 'a';
  TORCH_CHECK(satisfies(arch, {gpu, exact}), op, " ", step, " needs compute capability ", arch,
              ", this GPU has ", text(major), ".", text(minor));

  // The driver takes the newest of what runs, so that is the code which must be able to do the step.
  const Architecture* chosen = nullptr;
  for (const Architecture& built : built_architectures()) {
    if (!runs(built, gpu)) continue;
    if (!chosen || std::pair(built.capability, built.exact) > std::pair(chosen->capability, chosen->exact)) {
      chosen = &built;
    }
  }
  TORCH_CHECK(chosen && satisfies(arch, *chosen), op, " ", step,
              " was not built for this GPU's compute capability ", text(major), ".", text(minor), " but for ",
              KERNEL_TWINS_ARCHS, ": build again with TORCH_CUDA_ARCH_LIST=", text(major), ".", text(minor),
              exact ? "a" : "");
}

// -----------------------------------------------------------------------------------------------------------
// Launching
// -----------------------------------------------------------------------------------------------------------

// The step of that name, once the device of `on` is found to run it.
template <typename Args>
const Step<Args>& find_step(const char* op, const StepTable<Args>& steps, const std::string& name,
                            const Tensor& on) {
  const Step<Args>* step = steps.find(name);
  if (!step) {
    std::string names;
    for (const Step<Args>* known = steps.begin; known != steps.end; ++known) {
      names += (names.empty() ? "" : ", ") + std::string(known->name);
    }
    TORCH_CHECK_VALUE(false, "step is '", name, "'; ", op, " has ", names);
  }
  require_architecture(op, name, step->arch, on.get_device());
  return *step;
}

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::fp32;
    case at::kBFloat16:
      return Dtype::bf16;
    case at::kHalf:
      return Dtype::fp16;
    default:
      TORCH_INTERNAL_ASSERT(false, "require_dtype lets no other through");
  }
}

// Autograd must know when a tensor that it has saved is written to behind its back.
void mark_written(const Tensor& out) {
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

at::DataPtr allocate(size_t bytes) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(std::max(bytes, size_t{1}));
}

// Memory that kernels find zero and leave zero, and the capture that it was made for: 0, where it was none.
struct Zeroed {
  at::DataPtr memory;
  unsigned long long capture = 0;
};

// That memory for a launch on that stream; ZEROED_BYTES of it.
//
// Each stream has its own, as launches on one stream do not overlap. So has each capture of a stream: graphs
// may run beside each other and beside eager calls, and so theirs lies in the graph's memory and is zeroed
// inside the graph. Only the newest capture's is remembered. The id of a capture is unique: one that was
// given up has never zeroed its memory, and the next one must not take that over.
Zeroed& zeroed_of(cudaStream_t stream, int device) {
  // By device, stream and whether it is capturing. Guarded by Python's lock. Never destroyed, since the
  // allocator may be gone by then.
  static auto& kept = *new std::map<std::tuple<int, unsigned long long, bool>, Zeroed>;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
  const bool capturing = status == cudaStreamCaptureStatusActive;
  // A stream's id is its own for ever, while a handle may come back as another stream's; but under capture it
  // cannot be asked for, and need not, as the id of the capture tells them apart.
  unsigned long long id = reinterpret_cast<uintptr_t>(stream);
  if (!capturing) {
    capture = 0;
    C10_CUDA_CHECK(cudaStreamGetId(stream, &id));
  }

  Zeroed& zeroed = kept[{device, id, capturing}];
  if (!zeroed.memory || zeroed.capture != capture) {
    at::DataPtr memory = allocate(ZEROED_BYTES);
    C10_CUDA_CHECK(cudaMemsetAsync(memory.get(), 0, ZEROED_BYTES, stream));
    zeroed = {std::move(memory), capture};
  }
  return zeroed;
}

// Lends a launcher memory for the call that it is made for, on the current stream.
//
// Torch's allocator hands memory back in stream order and from a graph's own pool, so a workspace may be
// freed once everything that uses it is launched.
class Lender {
 public:
  void* workspace(size_t bytes) { return workspaces_.emplace_back(allocate(bytes)).get(); }

  void* zeroed() {
    if (!zeroed_) zeroed_ = &zeroed_of(stream_, stream_.device_index());
    return zeroed_->memory.get();
  }

  // Calls the launcher; where it throws, nobody knows what the zeroed memory holds that it asked for.
  template <typename Args>
  void launch(const Step<Args>& step, const Args& args) {
    try {
      step.launch(args);
    } catch (...) {
      if (zeroed_) zeroed_->memory.clear();
      throw;
    }
  }

  // How launchers, which know no torch, call it; valid as long as it is.
  Memory memory() {
    return {
        .caller = this,
        .workspace_of = [](void* self, size_t bytes) { return static_cast<Lender*>(self)->workspace(bytes); },
        .zeroed_of = [](void* self) { return static_cast<Lender*>(self)->zeroed(); }};
  }

 private:
  c10::cuda::CUDAStream stream_ = c10::cuda::getCurrentCUDAStream();
  std::vector<at::DataPtr> workspaces_;
  Zeroed* zeroed_ = nullptr;
};

void vector_add(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  require_dtype("a", a, {at::kFloat, at::kBFloat16, at::kHalf});
  require_cuda("a", a);
  require_contiguous("a", a);
  const auto check = [&](const char* name, const Tensor& tensor) {
    require_dtype(name, tensor, {at::kFloat, at::kBFloat16, at::kHalf});
    require_same_dtype(name, tensor, "a", a);
    require_device(name, tensor, "a", a);
    require_shape(name, tensor, a.sizes(), "a, b and out are not broadcast");
    require_contiguous(name, tensor);
  };
  check("b", b);
  check("out", out);
  // Every thread reads its elements before it writes them, so out may be an input, but not one that is
  // shifted.
  if (out.const_data_ptr() != a.const_data_ptr()) require_apart(out, "a", a);
  if (out.const_data_ptr() != b.const_data_ptr()) require_apart(out, "b", b);

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

void reduction(const std::string& step, const Tensor& x, const Tensor& out) {
  require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  require_cuda("x", x);
  require_contiguous("x", x);
  require_dtype("out", out, {at::kFloat});
  require_device("out", out, "x", x);
  require_shape("out", out, {}, "the sum of everything is one number");
  require_apart(out, "x", x);

  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("reduction", reduction_steps, step, x);
  size_t workspace_bytes = 0;
  ReductionArgs args{.x = x.const_data_ptr(),
                     .out = out.mutable_data_ptr<float>(),
                     .n = x.numel(),
                     .dtype = dtype_of(x),
                     .workspace = nullptr,
                     .workspace_bytes = &workspace_bytes,
                     .zeroed = nullptr,
                     .stream = c10::cuda::getCurrentCUDAStream()};
  found.launch(args);  // only asks for the size
  Lender lender;
  args.workspace = lender.workspace(workspace_bytes);
  args.zeroed = lender.zeroed();
  lender.launch(found, args);
  mark_written(out);
}

// One product for all: they differ in their dtypes alone. out is of a's dtype, or fp32. T as in MatmulArgs.
template <typename T>
void matmul(const char* op, const StepTable<MatmulArgs<T>>& steps,
            std::initializer_list<at::ScalarType> dtypes, const std::string& step, const Tensor& a,
            const Tensor& b, const Tensor& out) {
  const auto require_matrix = [&](const char* name, const Tensor& tensor) {
    require_rank(name, tensor, 2);
    require_device(name, tensor, "a", a);
  };
  require_dtype("a", a, dtypes);
  require_matrix("a", a);
  require_dtype("b", b, dtypes);
  require_same_dtype("b", b, "a", a);
  require_matrix("b", b);
  if (a.scalar_type() == at::kFloat) {
    require_dtype("out", out, {at::kFloat});
  } else {
    require_dtype("out", out, {a.scalar_type(), at::kFloat});
  }
  require_matrix("out", out);
  require_shape("b", b, {a.size(1), b.size(1)}, "its rows are a's columns");
  require_shape("out", out, {a.size(0), b.size(1)}, "a's rows by b's columns");
  require_contiguous("out", out);
  require_apart(out, "a", a);
  require_apart(out, "b", b);

  const c10::cuda::CUDAGuard guard(a.device());
  const auto& found = find_step(op, steps, step, a);
  if (!found.fp32_out && out.scalar_type() != a.scalar_type()) {
    std::string others;
    for (const auto* each = steps.begin; each != steps.end; ++each) {
      if (each->fp32_out) others += (others.empty() ? "" : ", ") + std::string(each->name);
    }
    TORCH_CHECK_TYPE(false, "out is ", dtype_name(out.scalar_type()), ", must be ",
                     dtype_name(a.scalar_type()), ": ", op, " ", step, " writes no other, take ", others);
  }
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.a = static_cast<const T*>(a.const_data_ptr()),
                        .b = static_cast<const T*>(b.const_data_ptr()),
                        .out = static_cast<T*>(out.mutable_data_ptr()),
                        .M = a.size(0),
                        .N = b.size(1),
                        .K = a.size(1),
                        .stride_am = a.stride(0),
                        .stride_ak = a.stride(1),
                        .stride_bk = b.stride(0),
                        .stride_bn = b.stride(1),
                        .dtype = dtype_of(a),
                        .out_dtype = dtype_of(out),
                        .memory = &memory,
                        .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

void matmul_fp32(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul("matmul_fp32", matmul_fp32_steps, {at::kFloat}, step, a, b, out);
}

void matmul_tf32x3(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul("matmul_tf32x3", matmul_tf32x3_steps, {at::kFloat}, step, a, b, out);
}

void matmul_bf16(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul("matmul_bf16", matmul_bf16_steps, {at::kBFloat16, at::kHalf}, step, a, b, out);
}

void probe(const std::string& name, const Tensor& buffer, int64_t iterations) {
  require_dtype("buffer", buffer, {at::kByte});
  require_cuda("buffer", buffer);
  require_contiguous("buffer", buffer);
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % 16 == 0,
                    "buffer starts at an address that is not a multiple of 16: do not slice it");
  TORCH_CHECK_VALUE(iterations >= 0, "iterations is ", text(iterations), ", must be at least 0");

  const c10::cuda::CUDAGuard guard(buffer.device());
  const auto& found = find_step("probe", probe_steps, name, buffer);
  found.launch({.buffer = buffer.mutable_data_ptr(),
                .bytes = buffer.numel(),
                .iterations = iterations,
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(buffer);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using py::arg;
  using torch::wrap_pybind_function;  // turns torch's errors into TypeError, ValueError and OutOfMemoryError
  m.doc() =
      "The CUDA steps. Each function launches the named step on the current stream and writes into out.";
  m.attr("architectures") = KERNEL_TWINS_ARCHS;
  m.def("vector_add", wrap_pybind_function(vector_add), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a + b. Contiguous, of one shape; all fp32, bf16 or fp16. out may be a or b.");
  m.def("reduction", wrap_pybind_function(reduction), arg("step"), arg("x"), arg("out"),
        "out = the sum of x. x: contiguous, any shape, fp32, bf16 or fp16; out: fp32, no dimensions.");
  m.def("matmul_fp32", wrap_pybind_function(matmul_fp32), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a @ b in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous.");
  m.def("matmul_tf32x3", wrap_pybind_function(matmul_tf32x3), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a @ b, fp32 from three TF32 products. a: [M, K], b: [K, N], any strides; out: [M, N], "
        "contiguous.");
  m.def("matmul_bf16", wrap_pybind_function(matmul_bf16), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a @ b, summed in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous. a and b "
        "are bf16 or fp16 alike, out is so or fp32.");
  m.def("probe", wrap_pybind_function(probe), arg("name"), arg("buffer"), arg("iterations"),
        "Launches a probe of hardware-survey/probes.h. buffer: contiguous uint8, overwritten.");
}
