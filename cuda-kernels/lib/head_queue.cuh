// The queue of tiles of heads that persistent blocks draw from.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common.cuh"
#include "head_limits.h"
#include "step.h"

constexpr int64_t SECTION_BYTES = 32 << 20;  // of what a section's tiles share: part of L2's 50 MB
constexpr int64_t LAST_TILES = 2;            // for each SM, of the heads that leave the end light

// The order of tiles, as persistent blocks take them: sections of heads whose shared operands fit into L2
// together. Where a head's first or last tiles take longest, these come first, one of each head. A heavy tile
// that is drawn late keeps the other SMs waiting: so the lighter halves of the last heads come after all
// else.
struct Queue {
  int tiles;
  int heads;          // over all batches
  int section;        // heads
  int before;         // heads before those whose `light` tiles come at the end
  int light;          // 0 where all tiles take equally long
  int block, blocks;  // a tile's rows, and a head's tiles
  bool last_first;    // a head's last tile takes longest
  unsigned* drawn;    // counts what blocks draw; 0 again when all have ended
};

// A tile: its head, over all batches, or -1 behind the last tile; and its first row.
struct Work {
  int head, row;
};

__device__ inline Work work_of(const Queue& queue, unsigned number) {
  if (number >= static_cast<unsigned>(queue.tiles)) return {-1, 0};
  const int tile = static_cast<int>(number), last_heads = queue.heads - queue.before;
  const int at_end = tile - (queue.tiles - last_heads * queue.light);
  const bool early = tile < queue.before * queue.blocks;
  const int from = early ? 0 : queue.before, blocks = queue.blocks - (early ? 0 : queue.light);
  const int in_part = tile - from * queue.blocks;
  // Of the section, or of the end: its first head, its heads, and the tile's number.
  const int at = at_end < 0 ? from + in_part / (queue.section * blocks) * queue.section : queue.before;
  const int heads = at_end < 0 ? min(queue.section, queue.heads - at) : last_heads;
  const int within = at_end < 0 ? in_part - (at - from) * blocks : at_end + blocks * last_heads;
  const int block = within / heads;
  return {at + within % heads, (queue.last_first ? queue.blocks - 1 - block : block) * queue.block};
}

// For `heads` of `rows` rows, in tiles of `block`. Of these heads `group` share operands of `bytes`.
inline Queue queue_of_heads(const Memory& memory, int64_t heads, int64_t rows, int64_t block, int64_t blocks,
                            int64_t group, int64_t bytes) {
  Queue queue = {};
  queue.tiles = static_cast<int>(blocks_of(heads, rows, blocks));
  queue.heads = static_cast<int>(heads);
  queue.section = static_cast<int>(std::clamp<int64_t>(SECTION_BYTES / std::max<int64_t>(bytes, 1) * group,
                                                       std::min(group, heads), heads));
  queue.block = static_cast<int>(block);
  queue.blocks = static_cast<int>(blocks);
  queue.drawn = static_cast<unsigned*>(memory.zeroed());
  return queue;
}

// Orders the queue by what tiles take: a head's first tile about `first`, its last one `last`, of any unit.
inline void weigh(Queue& queue, int64_t first, int64_t last) {
  if (first == last || queue.tiles == 0) return;
  queue.last_first = last > first;
  queue.light = queue.blocks / 2;
  const int64_t heads = cdiv(LAST_TILES * multiprocessor_count(), queue.blocks);
  queue.before = static_cast<int>(std::max<int64_t>(queue.heads - heads, 0) / queue.section * queue.section);
}
