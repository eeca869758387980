// Maps the number of an output, or of a reduced element, to its address, without a division.
#pragma once

#include "axes.h"
#include "common.cuh"

struct Offsets {
  int64_t offset;  // in x
  int64_t step;    // in out, or in argmax's index
};

// The coordinate along the innermost axis, and the place of the outer coordinates.
struct Spot {
  int64_t inner;
  Offsets outer;
};

// Splits a number into the coordinate along an axis, which is returned, and the number along the outer axes,
// which stays in `index`. The product with the reciprocal is the quotient or one less, for any index and
// size.
__device__ inline int64_t split_off(int64_t& index, const Axis& axis) {
  int64_t quotient = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(index), axis.reciprocal));
  int64_t rest = index - quotient * axis.size;
  if (rest >= axis.size) {
    ++quotient;
    rest -= axis.size;
  }
  index = quotient;
  return rest;
}

__device__ inline Spot spot_of(const Axes& axes, int64_t index) {
  Spot spot = {index, {0, 0}};
  if (axes.rank == 1) return spot;
  spot.inner = split_off(index, axes.axis[axes.rank - 1]);
  for (int a = axes.rank - 2; a > 0; --a) {
    const int64_t at = split_off(index, axes.axis[a]);
    spot.outer.offset += at * axes.axis[a].stride;
    spot.outer.step += at * axes.axis[a].step;
  }
  spot.outer.offset += index * axes.axis[0].stride;
  spot.outer.step += index * axes.axis[0].step;
  return spot;
}

__device__ inline Offsets place_of(const Axes& axes, int64_t index) {
  const Spot spot = spot_of(axes, index);
  const Axis& inner = axes.axis[axes.rank - 1];
  return {spot.outer.offset + spot.inner * inner.stride, spot.outer.step + spot.inner * inner.step};
}
