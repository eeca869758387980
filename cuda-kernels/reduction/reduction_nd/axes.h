// The axes of a tensor as kernels walk them: kept and reduced ones apart, each in the order of memory.
//
// No CUDA in it: tests compile it alone. triton-kernels/reduction/reduction_nd/axes.py does the same.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int MOST_AXES = 5;

struct Axis {
  int64_t size;
  int64_t stride;       // in elements of x
  int64_t step;         // in elements of out, or, of a reduced axis, in places that argmax tells
  uint64_t reciprocal;  // 2^64 / size, rounded down, or 1 less

  Axis() = default;
  Axis(int64_t size, int64_t stride, int64_t step)
      : size(size),
        stride(stride),
        step(step),
        reciprocal(size > 0 ? ~uint64_t{0} / static_cast<uint64_t>(size) : 0) {}
};

// The outermost first, at least one; `count` is the product of their sizes.
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

// As few axes as there can be of those of a tensor that are reduced, or of those that are not; the last has
// the nearest elements.
//
// Axes of one element are dropped. Neighbours are merged where one goes on where the other ends, in memory
// and, where the result is `ordered`, in what is stored or told, too; else steps mean nothing. Axes of stride
// 0 come first.
inline Axes axes_of(int rank, const int64_t* sizes, const int64_t* strides, const bool* reduced, bool which,
                    bool ordered) {
  Axis found[MOST_AXES];  // the innermost first
  int count = 0;
  int64_t step = 1;
  for (int a = rank - 1; a >= 0; --a) {
    if (reduced[a] != which) continue;
    if (sizes[a] != 1) found[count++] = Axis(sizes[a], strides[a], step);
    step *= sizes[a];
  }
  // Of equal strides the one that was given last is the inner one, so that equal axes keep their order.
  std::stable_sort(found, found + count, [](const Axis& a, const Axis& b) {
    return a.stride != 0 && (b.stride == 0 || a.stride < b.stride);
  });
  int merged = 0;
  for (int a = 0; a < count; ++a) {
    const Axis outer = found[a];
    Axis& inner = found[merged - (merged > 0)];
    if (merged > 0 && outer.stride == inner.size * inner.stride &&
        (!ordered || outer.step == inner.size * inner.step)) {
      inner = Axis(outer.size * inner.size, inner.stride, inner.step);
    } else {
      found[merged++] = outer;
    }
  }
  if (merged == 0) found[merged++] = Axis(1, 0, 0);

  Axes axes;
  axes.rank = merged;
  for (int a = 0; a < merged; ++a) {
    axes.axis[a] = found[merged - 1 - a];
    axes.count *= axes.axis[a].size;
  }
  return axes;
}

// Whether neighbours in memory lie along a reduced axis rather than along a kept one.
inline bool along_reduced(const Axes& kept, const Axes& reduced) {
  const auto distance = [](const Axes& axes) {
    return axes.inner().stride == 0 ? INT64_MAX : axes.inner().stride;
  };
  return distance(reduced) <= distance(kept);
}
