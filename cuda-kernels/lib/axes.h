// The axes of a tensor in the form that kernels loop over: kept and reduced axes apart, each in the order of
// memory (reduction_nd's merged_axes.h). Its counterpart is triton-kernels/reduction/reduction_nd/axes.py.
#pragma once

#include <cstdint>

constexpr int MOST_AXES = 5;

struct Axis {
  int64_t size;
  int64_t stride;       // in elements of x
  int64_t step;         // in elements of out; for a reduced axis, in argmax's index
  uint64_t reciprocal;  // 2^64 / size, rounded down, or 1 less

  Axis() = default;
  Axis(int64_t size, int64_t stride, int64_t step)
      : size(size),
        stride(stride),
        step(step),
        reciprocal(size > 0 ? ~uint64_t{0} / static_cast<uint64_t>(size) : 0) {}
};

// Axes, the outermost first, at least one. `count` is the product of their sizes.
struct Axes {
  int rank = 0;
  int64_t count = 1;
  Axis axis[MOST_AXES];

  const Axis& inner() const { return axis[rank - 1]; }
  void set_inner(Axis changed) {
    axis[rank - 1] = changed;
    count = 1;
    for (int a = 0; a < rank; ++a) count *= axis[a].size;
  }
};

// True if the smallest stride belongs to a reduced axis, false if to a kept one.
inline bool along_reduced(const Axes& kept, const Axes& reduced) {
  const auto distance = [](const Axes& axes) {
    return axes.inner().stride == 0 ? INT64_MAX : axes.inner().stride;
  };
  return distance(reduced) <= distance(kept);
}

// The elements from the tensor's first one to behind its last one.
inline int64_t extent_of(const Axes& kept, const Axes& reduced) {
  int64_t extent = 1;
  for (const Axes* axes : {&kept, &reduced}) {
    for (int a = 0; a < axes->rank; ++a) extent += (axes->axis[a].size - 1) * axes->axis[a].stride;
  }
  return extent;
}

// A run is the elements along the innermost reduced axis. Whether several runs may end within `near` elements
// of the tensor's end, as those of expanded tensors do.
inline bool ends_meet(const Axes& kept, const Axes& reduced, int64_t near) {
  for (const Axes* axes : {&kept, &reduced}) {
    for (int a = 0; a < axes->rank - (axes == &reduced); ++a) {
      if (axes->axis[a].size > 1 && axes->axis[a].stride < near) return true;
    }
  }
  return false;
}
