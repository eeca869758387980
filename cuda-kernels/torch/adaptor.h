// What every function that torch calls needs: its checks, a step for the device, memory for the launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "lib/activation.h"
#include "lib/step.h"

#ifndef KERNEL_TWINS_ARCHS
#error "KERNEL_TWINS_ARCHS must name the architectures that the .cu files are compiled for, such as 8.0;9.0a"
#endif

namespace kernel_twins {

using at::Tensor;

// -----------------------------------------------------------------------------------------------------------
// Arguments: the counterpart of kernel_twins/ops/tensors.py
// -----------------------------------------------------------------------------------------------------------

// Messages are put together from strings, and numbers through this: where a compiler links libstdc++
// statically, as some containers' do, streaming a number through torch's macros crashes.
inline std::string text(int64_t value) { return std::to_string(value); }

inline std::string text(const c10::SymInt& value) {
  const auto known = value.maybe_as_int();
  return known ? text(*known) : "a symbol";
}

// Sizes or strides as Python prints a tuple: (), (5,), (2, 3).
template <typename Int>
std::string tuple(at::ArrayRef<Int> values) {
  std::string items;
  for (size_t i = 0; i < values.size(); ++i) items += (i ? ", " : "") + text(values[i]);
  return "(" + items + (values.size() == 1 ? ",)" : ")");
}

// As Python prints it: torch.float32. Without Python, as operators run without its lock.
inline std::string dtype_name(at::ScalarType dtype) { return "torch." + c10::getDtypeNames(dtype).first; }

// How to mend an argument. A converted copy of a result would be written to in its place, and lost.
inline std::string remedy(std::string_view name, const std::string& method) {
  const bool result = name == "out" || name.substr(0, 4) == "out[";
  return result ? "allocate it so with torch.empty" : "call " + std::string(name) + "." + method;
}

inline void require_dtype(const char* name, const Tensor& tensor,
                          std::initializer_list<at::ScalarType> accepted) {
  if (std::find(accepted.begin(), accepted.end(), tensor.scalar_type()) != accepted.end()) return;
  std::string names;
  for (at::ScalarType dtype : accepted) names += (names.empty() ? "" : " or ") + dtype_name(dtype);
  TORCH_CHECK_TYPE(false, name, " is ", dtype_name(tensor.scalar_type()), ", must be ", names, ": ",
                   remedy(name, "to(...)"));
}

inline void require_same_dtype(const char* name, const Tensor& tensor, const char* other_name,
                               const Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), name, " is ",
                   dtype_name(tensor.scalar_type()), ", must be ", dtype_name(other.scalar_type()), " like ",
                   other_name, ": ", remedy(name, std::string("to(") + other_name + ".dtype)"));
}

inline void require_same_device(const char* name, const Tensor& tensor, const char* other_name,
                                const Tensor& other) {
  TORCH_CHECK_VALUE(tensor.device() == other.device(), name, " is on ", tensor.device().str(),
                    ", must be on ", other.device().str(), " like ", other_name, ": ",
                    remedy(name, std::string("to(") + other_name + ".device)"));
}

// What a step reads through a pointer: values that lie in a GPU's memory as they are.
inline void require_cuda(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cuda(), name, " is on ", tensor.device().str(),
                    ", must be on a CUDA device: ", remedy(name, "cuda()"));
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, " has layout ", tensor.layout(),
                    ", must be strided: ", remedy(name, "to_dense()"));
  TORCH_CHECK_VALUE(!tensor.is_neg(), name, " is negated lazily, must hold its values: call ", name,
                    ".resolve_neg()");
}

inline void require_device(const char* name, const Tensor& tensor, const char* like_name,
                           const Tensor& like) {
  require_same_device(name, tensor, like_name, like);
  require_cuda(name, tensor);
}

inline void require_shape(const char* name, const Tensor& tensor, at::IntArrayRef shape, const char* remedy) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " has shape ", tuple(tensor.sizes()), ", must have ",
                    tuple(shape), ": ", remedy);
}

inline void require_rank(const char* name, const Tensor& tensor, int64_t rank) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, name, " has ", text(tensor.dim()), " dimensions, must have ",
                    text(rank));
}

inline void require_contiguous(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " has strides ", tuple(tensor.strides()),
                    ", must be contiguous: ", remedy(name, "contiguous()"));
}

// The first byte of a tensor and the one past its last.
inline std::pair<uintptr_t, uintptr_t> extent(const Tensor& tensor) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

inline void require_apart(const Tensor& out, const char* name, const Tensor& input) {
  const auto [out_begin, out_end] = extent(out);
  const auto [begin, end] = extent(input);
  TORCH_CHECK_VALUE(out_end <= begin || end <= out_begin || out_begin == out_end || begin == end,
                    "out overlaps ", name, " in memory, must be apart from it: allocate it with torch.empty");
}

inline Activation activation_of(std::string_view name) {
  constexpr std::pair<std::string_view, Activation> NAMES[] = {{"none", Activation::none},
                                                               {"relu", Activation::relu},
                                                               {"gelu", Activation::gelu},
                                                               {"gelu_tanh", Activation::gelu_tanh},
                                                               {"silu", Activation::silu}};
  for (const auto& [known, activation] : NAMES) {
    if (name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, "activation is '", std::string(name),
                    "', must be none, relu, gelu, gelu_tanh or silu: apply others to the result");
}

inline void require_probability(double p) {
  char number[32];
  std::snprintf(number, sizeof(number), "%g", p);
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "p is ", std::string(number),
                    ", must be from 0 to 1: the share of elements that are dropped");
}

// x + bias, which the slope of an activation is taken at, is there exactly where there is an activation.
inline void require_slopes(Activation activation, std::string_view name, bool has_x, bool has_bias) {
  if (activation == Activation::none) {
    TORCH_CHECK_VALUE(!has_x && !has_bias,
                      "activation is 'none', which has no use for x and bias: leave them out");
  } else {
    TORCH_CHECK_VALUE(has_x, "x is missing, must be there: the slope of '", std::string(name),
                      "' is taken at x + bias");
  }
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

inline Architecture parse_architecture(const std::string& text) {
  char* rest = nullptr;
  const int major = std::strtol(text.c_str(), &rest, 10);
  const int minor = *rest == '.' ? std::strtol(rest + 1, &rest, 10) : 0;
  return {{major, minor}, *rest == 'a', text.find("+PTX") != std::string::npos};
}

// Those of a list that is spelled like TORCH_CUDA_ARCH_LIST.
inline std::vector<Architecture> parse_architectures(std::string list) {
  std::replace(list.begin(), list.end(), ';', ' ');
  std::istringstream words(list);
  std::vector<Architecture> architectures;
  for (std::string word; words >> word;) architectures.push_back(parse_architecture(word));
  return architectures;
}

// What this build is for.
inline const std::vector<Architecture>& built_architectures() {
  static const std::vector<Architecture> built = parse_architectures(KERNEL_TWINS_ARCHS);
  return built;
}

// Whether a GPU runs code built for an architecture: code for its generation up to its own number, or any
// PTX.
inline bool runs(const Architecture& built, std::pair<int, int> gpu) {
  if (built.exact) return built.capability == gpu;
  const bool same_generation = built.capability.first == gpu.first;
  return (same_generation || built.ptx) && built.capability <= gpu;
}

// Whether code for that architecture is what a step's arch (">=9.0", "==9.0a") asks for.
inline bool satisfies(const std::string& arch, const Architecture& given) {
  const Architecture needed = parse_architecture(arch.substr(2));
  if (arch.substr(0, 2) == "==") return given.capability == needed.capability && given.exact == needed.exact;
  return given.capability >= needed.capability;
}

// Whether a GPU runs a step of that arch that was compiled for those architectures.
inline bool runs_step(const std::string& arch, std::pair<int, int> gpu,
                      const std::vector<Architecture>& architectures) {
  // The driver takes the newest of what runs, so that is the code which must be able to do the step.
  const Architecture* chosen = nullptr;
  for (const Architecture& built : architectures) {
    if (!runs(built, gpu)) continue;
    if (!chosen || std::pair(built.capability, built.exact) > std::pair(chosen->capability, chosen->exact)) {
      chosen = &built;
    }
  }
  return chosen && satisfies(arch, *chosen);
}

// Why this GPU runs a step not: it lacks the instructions, or this build does. Empty where it runs it.
inline std::string architecture_refusal(const std::string& op, const std::string& step,
                                        const std::string& arch, int device) {
  int major = 0;
  int minor = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const std::pair<int, int> gpu = {major, minor};
  if (runs_step(arch, gpu, built_architectures())) return "";
  const std::string has = text(major) + "." + text(minor);
  const bool exact = arch.back() == 'a';
  if (!satisfies(arch, {gpu, exact})) {
    return op + " " + step + " needs compute capability " + arch + ", this GPU has " + has;
  }
  return op + " " + step + " was not built for this GPU's compute capability " + has + " but for " +
         KERNEL_TWINS_ARCHS + ": build again with TORCH_CUDA_ARCH_LIST=" + has + (exact ? "a" : "");
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
  const std::string refusal = architecture_refusal(op, name, step->arch, on.get_device());
  TORCH_CHECK(refusal.empty(), refusal);
  return *step;
}

inline Dtype dtype_of(at::ScalarType dtype) {
  switch (dtype) {
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

inline Dtype dtype_of(const Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

// Autograd must know when a tensor that it has saved is written to behind its back.
inline void mark_written(const Tensor& out) {
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

inline at::DataPtr allocate(size_t bytes) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(std::max(bytes, size_t{1}));
}

// Memory that kernels find zero and leave zero, ZEROED_BYTES of it.
struct Zeroed {
  void* memory = nullptr;
  unsigned long long capture = 0;  // that it was made for, and is zeroed in; 0, where it was none
  bool clean = false;
};

// The driver neither allocates nor frees while any thread captures, unless this one says that it knows.
class UnrestrictedCapture {
 public:
  UnrestrictedCapture() { C10_CUDA_IGNORE_ERROR(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~UnrestrictedCapture() { C10_CUDA_IGNORE_ERROR(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  UnrestrictedCapture(const UnrestrictedCapture&) = delete;
  UnrestrictedCapture& operator=(const UnrestrictedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one before
};

// Pieces of such memory on one device.
//
// They come from the driver: what torch's allocator hands out and is never given back makes torch's graph
// trees refuse the graph, or is handed out again with it. Pieces are never freed, but used again.
class ZeroedPieces {
 public:
  void* take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        void* piece = free_.back();
        free_.pop_back();
        return piece;
      }
    }
    return make();  // unlocked: the driver's own thread may be giving a piece back
  }

  // Keeps a piece for as long as a graph or anything made from it may run, and takes it back after that.
  void lend(void* piece, cudaGraph_t graph) {
    auto* loan = new Loan{this, piece};
    cudaUserObject_t object = nullptr;
    // Called by a thread of the driver's, which must not call the driver.
    const auto give_back = [](void* of) {
      auto* loan = static_cast<Loan*>(of);
      const std::lock_guard lock(loan->pieces->mutex_);
      loan->pieces->free_.push_back(loan->piece);
      delete loan;
    };
    C10_CUDA_CHECK(cudaUserObjectCreate(&object, loan, give_back, 1, cudaUserObjectNoDestructorSync));
    C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  }

 private:
  struct Loan {
    ZeroedPieces* pieces;
    void* piece;
  };

  static void* make() {
    const UnrestrictedCapture unrestricted;
    void* piece = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&piece, ZEROED_BYTES));
    return piece;
  }

  std::mutex mutex_;
  std::vector<void*> free_;
};

// Whether a stream is somebody else's, and does not capture. Torch's ids are no handles, but for the default
// stream's, which has 0 for both.
//
// Its owner may destroy it while it works, tells nobody, and its handle comes back as another stream's. So
// nothing is kept for it, and launchers' memory comes from the driver: torch's allocator knows a stream by
// its handle, and would hand out to the new stream what the old one still uses. A capture has its graph's
// memory.
inline bool may_be_destroyed_at_work(c10::cuda::CUDAStream stream) {
  const auto handle = reinterpret_cast<uintptr_t>(stream.stream());
  if (handle == 0 || static_cast<uintptr_t>(stream.id()) != handle) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status == cudaStreamCaptureStatusNone;
}

// The zeroed memory that is kept for launches on a stream; not for one that may be destroyed at work.
//
// Each stream of torch's has its own, as launches on one stream do not overlap. So has each capture of a
// stream: graphs may run beside each other and beside eager calls, and so theirs is zeroed inside the graph
// and belongs to it. Only the newest capture's is remembered. The id of a capture is unique: one that was
// given up has never zeroed its memory, and the next one must not take that over.
inline Zeroed* zeroed_of(c10::cuda::CUDAStream stream) {
  // By device, stream and whether it is capturing. Never destroyed, since the driver may be gone by then.
  static auto& mutex = *new std::mutex;
  static auto& kept = *new std::map<std::tuple<int, cudaStream_t, bool>, Zeroed>;
  static auto& pieces = *new std::map<int, ZeroedPieces>;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph));
  const bool capturing = status == cudaStreamCaptureStatusActive;
  if (!capturing) capture = 0;

  // Where two threads launch on one stream, torch leaves their order open, but what is kept must not break.
  const std::lock_guard lock(mutex);
  const int device = stream.device_index();
  Zeroed& zeroed = kept[{device, stream.stream(), capturing}];
  if (!zeroed.memory || zeroed.capture != capture) {
    void* piece = pieces[device].take();
    if (capturing) pieces[device].lend(piece, graph);
    zeroed = {piece, capture};
  }
  if (!zeroed.clean) {
    C10_CUDA_CHECK(cudaMemsetAsync(zeroed.memory, 0, ZEROED_BYTES, stream));
    zeroed.clean = true;
  }
  return &zeroed;
}

// Lends a launcher memory for the call that it is made for, on the current stream.
//
// Torch's allocator, or the driver, hands memory back in stream order and from a graph's own pool, so a
// workspace may be freed once everything that uses it is launched.
class Lender {
 public:
  Lender() = default;
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;
  ~Lender() {
    if (from_driver_.empty()) return;
    const UnrestrictedCapture unrestricted;
    for (void* memory : from_driver_) C10_CUDA_IGNORE_ERROR(cudaFreeAsync(memory, stream_));
  }

  cudaStream_t stream() const { return stream_; }

  void* workspace(size_t bytes) {
    if (passing_) {
      const UnrestrictedCapture unrestricted;
      void* memory = nullptr;
      if (cudaMallocAsync(&memory, std::max(bytes, size_t{1}), stream_) == cudaSuccess) {
        return from_driver_.emplace_back(memory);
      }
      (void)cudaGetLastError();  // torch may have memory where the driver has none, and says so if not
    }
    return workspaces_.emplace_back(allocate(bytes)).get();
  }

  void* zeroed() {
    if (!zeroed_ && passing_) {
      own_.memory = workspace(ZEROED_BYTES);
      C10_CUDA_CHECK(cudaMemsetAsync(own_.memory, 0, ZEROED_BYTES, stream_));
      zeroed_ = &own_;
    }
    if (!zeroed_) zeroed_ = zeroed_of(stream_);
    return zeroed_->memory;
  }

  // Calls the launcher; where it throws, nobody knows what the zeroed memory holds that it asked for.
  template <typename Args>
  void launch(const Step<Args>& step, const Args& args) {
    try {
      step.launch(args);
    } catch (...) {
      if (zeroed_) zeroed_->clean = false;
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
  bool passing_ = may_be_destroyed_at_work(stream_);
  std::vector<at::DataPtr> workspaces_;
  std::vector<void*> from_driver_;  // workspaces, too
  Zeroed* zeroed_ = nullptr;
  Zeroed own_;  // where none is kept for the stream
};

}  // namespace kernel_twins
