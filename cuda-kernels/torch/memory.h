// The memory that launchers ask for: workspaces of a call, and what is kept zeroed for a stream.
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
