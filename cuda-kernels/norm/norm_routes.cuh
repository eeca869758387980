// Which kernel serves which rows: the table of layer_norm's v12 and rms_norm's v07. Terms: docs/glossary.md.
#pragma once

#include "norm_held.cuh"
#include "norm_lanes.cuh"
#include "norm_split.cuh"

// What has a row at once.
enum class By {
  LANES,        // lanes of a warp: normalise_shifted
  CLUSTER,      // the registers of a cluster, in packs laid out for out: normalise_held, where skews DIFFER
  LAUNCHES,     // nothing: two launches go through it, leave_moments and write_split
  STEP_BEFORE,  // whatever the step before takes
};

// The kernel for rows of up to `bytes` bytes in up to `rows` rows, if the skews of all matrices are ALIKE, or
// if some DIFFER.
struct Route {
  bool alike, differ;
  int64_t bytes, rows;
  By by;
};

constexpr int64_t ANY = INT64_MAX;
constexpr int64_t WARP_ROW = 4 * 1024;        // bytes that a warp holds in packs laid out for out
constexpr int64_t REGISTER_ROW = 512 * 1024;  // bytes that a cluster holds in registers
constexpr int64_t SHARED_ROW = MOST_CLUSTER_BLOCKS * LARGEST_PART;  // bytes that it holds in shared memory
// Rows that leave most SMs idle if each has a cluster of the largest size.
constexpr int64_t FEW_ROWS = 64;

// The first line that fits counts, or the next one if its kernel refuses.
constexpr Route ROUTES[] = {
    {true, false, REGISTER_ROW, ANY, By::STEP_BEFORE},
    {false, true, WARP_ROW, ANY, By::LANES},
    {false, true, REGISTER_ROW, ANY, By::CLUSTER},
    {true, true, ANY, FEW_ROWS, By::LAUNCHES},
    {true, true, SHARED_ROW, ANY,
     By::STEP_BEFORE},  // each row is read once, where two launches read it twice
    {true, true, ANY, ANY, By::LAUNCHES},
};

// Calls launch(By) by the table until one returns true; returns false where the step before is to be taken.
template <typename T, typename Launch>
bool launch_by_routes(const NormArgs& args, Launch launch) {
  const bool alike = are_alike<T>(args);
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  for (const Route& route : ROUTES) {
    if (!(alike ? route.alike : route.differ) || bytes > route.bytes || args.M > route.rows) continue;
    if (route.by == By::STEP_BEFORE) return false;
    if (launch(route.by)) return true;
  }
  return false;
}
