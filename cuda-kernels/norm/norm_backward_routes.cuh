// Which kernel serves which rows: the table of layer_norm_backward's v07 and rms_norm_backward's v05. Terms:
// docs/glossary.md.
#pragma once

#include "norm_backward_lanes.cuh"
#include "norm_backward_split.cuh"

// What has a row at once.
enum class By {
  LANES,        // lanes of a warp: backward_shifted
  LAUNCHES,     // nothing: two launches go through it, leave_gradient_sums and write_split
  STEP_BEFORE,  // whatever the step before takes
};

// The kernel for up to `rows` rows of x that touch packs of up to `bytes` bytes, if the skews of all matrices
// are ALIKE, or if some DIFFER; also with dadded, or without it alone.
struct Route {
  bool alike, differ, added;
  int64_t bytes, rows;
  By by;
};

constexpr int64_t ANY = INT64_MAX;
constexpr int64_t WARP_ROW =
    2 * 1024;  // bytes of x that a warp holds beside dout and the sums of its columns
// Bytes that the ring of a cluster holds, without dadded and with it, and those that its registers hold.
constexpr int64_t RING_ROW = 512 * 1024, RING_AND_ADDED = 366 * 1024, REGISTER_ROW = 256 * 1024;
// So few long rows that the second reading finds much of them in L2.
constexpr int64_t FEW_ROWS = 160, LONG_ROW = 128 * 1024;

// The first line that fits counts, or the next one if its kernel refuses.
constexpr Route ROUTES[] = {
    {true, false, false, RING_ROW, ANY, By::STEP_BEFORE},
    {true, false, true, RING_AND_ADDED, ANY, By::STEP_BEFORE},
    {false, true, true, WARP_ROW, ANY, By::LANES},
    {false, true, true, LONG_ROW, ANY, By::STEP_BEFORE},
    {false, true, true, ANY, FEW_ROWS, By::LAUNCHES},
    {false, true, true, REGISTER_ROW, ANY, By::STEP_BEFORE},  // read once, where two launches read twice
    {true, true, true, ANY, ANY, By::LAUNCHES},
};

// Calls launch(By) by the table until one returns true; returns false where the step before is to be taken.
template <typename T, typename Launch>
bool launch_by_routes(const NormBackwardArgs& args, Launch launch) {
  if (args.M == 0) return false;
  const bool alike = are_alike<T>(args);
  const int64_t bytes = packs_of<T>(args) * 16;
  for (const Route& route : ROUTES) {
    if (!(alike ? route.alike : route.differ) || (args.dadded && !route.added)) continue;
    if (bytes > route.bytes || args.M > route.rows) continue;
    if (route.by == By::STEP_BEFORE) return false;
    if (launch(route.by)) return true;
  }
  return false;
}
