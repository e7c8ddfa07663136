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
  // Makes the blocks of `image` reachable. `load`: with what they hold; else what they hold will be overwritten.
  lla_status open(const SlotMemory& memory, const SlotImage& image, Blocks blocks, bool load, lla_error* error) noexcept;
  // Puts the blocks back where they came from, and waits until they are there.
  lla_status store(lla_error* error) noexcept;

  const SlotMemory& memory() const { return staged_; }
  const SlotImage& image() const { return image_; }

 private:
  template <class Copy>
  lla_status each_block(Copy copy) noexcept;

  const Context& context_;
  void* stream_;
  SlotMemory device_, staged_;
  SlotImage original_, image_;
  Blocks blocks_;
  Array<char> buffer_;
};

}  // namespace lla
