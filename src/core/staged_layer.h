// SPDX-License-Identifier: Apache-2.0
// One layer's part of a history where the host can read and write it: the state's own memory, or, on a device, copies of the
// blocks that an image names.
#pragma once

#include "core/state.h"

namespace lla {

class StagedLayer {
 public:
  // Which blocks of the image are wanted.
  struct Blocks {
    bool nodes = true, rows = true;  // rows: tail and convolution
  };
  StagedLayer(const Context& context, void* stream) : context_(context), stream_(stream) {}
  // All that open() asks of such an image before the device is given work: whoever changes something before open() asks it
  // first, so that nothing has changed if the stream is captured or memory is short.
  lla_status reserve(const SlotMemory& memory, const SlotImage& image, Blocks blocks, lla_error* error) noexcept;
  // Makes the blocks of `image` reachable. `load`: with what they hold; else what they hold will be overwritten.
  lla_status open(const SlotMemory& memory, const SlotImage& image, Blocks blocks, bool load, lla_error* error) noexcept;
  // Puts the blocks back where they came from, and waits until they are there.
  lla_status store(lla_error* error) noexcept;

  const SlotMemory& memory() const { return staged_; }
  const SlotImage& image() const { return image_; }

 private:
  struct Bytes {
    int64_t nodes = 0, tail = 0, conv = 0;  // of all nodes
  };
  static Bytes bytes_of(const SlotMemory& memory, const SlotImage& image, Blocks blocks);
  template <class Copy>
  lla_status each_block(Copy copy) noexcept;

  const Context& context_;
  void* stream_;
  SlotMemory device_, staged_;
  SlotImage original_, image_;
  Array<char> buffer_;
};

}  // namespace lla
