// Memory for launchers: workspaces of one call, and zeroed memory that is kept for a stream.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "lib/step.h"

namespace kernel_twins {

inline at::DataPtr allocate(size_t bytes) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(std::max(bytes, size_t{1}));
}

// ZEROED_BYTES of memory that kernels find zero and leave zero.
struct Zeroed {
  void* memory = nullptr;
  unsigned long long capture = 0;  // id of the capture that zeroes it; 0 outside of captures
  bool clean = false;
};

// Lets this thread allocate and free while another one captures a graph, which the driver otherwise refuses.
class UnrestrictedCapture {
 public:
  UnrestrictedCapture() { C10_CUDA_IGNORE_ERROR(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~UnrestrictedCapture() { C10_CUDA_IGNORE_ERROR(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  UnrestrictedCapture(const UnrestrictedCapture&) = delete;
  UnrestrictedCapture& operator=(const UnrestrictedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // holds the previous mode after the exchange
};

// A pool of zeroed pieces on one device.
//
// The pieces come from the driver and are reused, never freed. From torch's allocator, memory that is kept
// makes torch's graph trees refuse a graph, or is handed out again together with the graph.
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
    return make();  // without the lock, which the driver's thread may want to return a piece
  }

  // Lends a piece to a graph: it returns to the pool when the graph and everything instantiated from it are
  // gone.
  void lend(void* piece, cudaGraph_t graph) {
    auto* loan = new Loan{this, piece};
    cudaUserObject_t object = nullptr;
    // Runs on a thread of the driver, where CUDA calls are forbidden.
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

// True if torch does not own the stream, and the stream is not capturing. For such a stream torch's id equals
// the handle; the default stream has 0 for both and is torch's.
//
// The owner may destroy such a stream while it works, without notice, and its handle may come back as another
// stream's. So nothing is kept for it, and its memory comes from the driver: torch's allocator knows a stream
// by its handle and would give the new stream memory that the old one still uses. A capture is exempt, since
// its memory belongs to the graph.
inline bool may_be_destroyed_at_work(c10::cuda::CUDAStream stream) {
  const auto handle = reinterpret_cast<uintptr_t>(stream.stream());
  if (handle == 0 || static_cast<uintptr_t>(stream.id()) != handle) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status == cudaStreamCaptureStatusNone;
}

// The zeroed memory that is kept for launches on a stream. Not for streams that may be destroyed at work.
//
// Each of torch's streams has its own piece, since launches on one stream do not overlap. Each capture of a
// stream has its own, too, zeroed inside the graph and owned by it, since graphs may run beside each other
// and beside eager calls. Only the newest capture of a stream is remembered, by its unique id: a capture that
// was given up never zeroed its piece, so the next one must not take it over.
inline Zeroed* zeroed_of(c10::cuda::CUDAStream stream) {
  // Keyed by device, stream, and whether it captures. Never destroyed, since the driver may be gone at exit.
  static auto& mutex = *new std::mutex;
  static auto& kept = *new std::map<std::tuple<int, cudaStream_t, bool>, Zeroed>;
  static auto& pieces = *new std::map<int, ZeroedPieces>;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph));
  const bool capturing = status == cudaStreamCaptureStatusActive;
  if (!capturing) capture = 0;

  // Two threads may launch on one stream; torch leaves their order open, but this table must survive it.
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

// Lends a launcher memory for one call on the current stream.
//
// Workspaces may be freed as soon as everything that uses them is launched: torch's allocator and the driver
// reuse memory in stream order, or from the graph's own pool.
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
      (void)cudaGetLastError();  // the driver is out of memory: torch may have some cached, or throws
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

  // Calls the launcher. If it throws, the content of its zeroed memory is unknown, so that is zeroed again
  // before the next use.
  template <typename Args>
  void launch(const Step<Args>& step, const Args& args) {
    // The driver's functions, which make tensor maps, need the device's context in this thread. One of
    // autograd's may not have it yet, if all memory so far came from torch's cache.
    C10_CUDA_CHECK(cudaSetDevice(stream_.device_index()));
    try {
      step.launch(args);
    } catch (...) {
      if (zeroed_) zeroed_->clean = false;
      throw;
    }
  }

  // The torch-free interface that launchers call; valid as long as this object.
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
  std::vector<void*> from_driver_;  // workspaces on streams that torch does not own
  Zeroed* zeroed_ = nullptr;
  Zeroed own_;  // zeroed memory on streams that torch does not own
};

}  // namespace kernel_twins
