// The ticket of a block that shares a tile with other blocks: who writes its part last merges all parts.
#pragma once

// A tile is blockIdx.x, its parts are blockIdx.y; it has a counter, 0 before and after. True in the block
// that writes the last part of the tile; it may then read all parts. All threads must call.
__device__ inline bool is_last(unsigned* counters) {
  __shared__ bool last;
  __syncthreads();  // waits for all threads' writes, which the ticket must follow
  if (threadIdx.x == 0) {
    // PTX ISA, "atom": counter = counter < last ? counter + 1 : 0; returns the old value. Release: the
    // block's earlier writes are visible to later tickets. Acquire: writes before earlier tickets are visible
    // here.
    unsigned ticket;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(&counters[blockIdx.x]), "r"(gridDim.y - 1)
                 : "memory");
    last = ticket == gridDim.y - 1;
  }
  __syncthreads();  // waits for the ticket
  return last;
}
