// SPDX-License-Identifier: Apache-2.0
// Import of states: bytes that may be anything, and images that were right before they were damaged and sealed again.
// Whatever is refused changes nothing; whatever is taken can be served, forked, exported and dropped like any other history;
// the slots beside it never change.
#include <algorithm>

#include "fuzz.h"

namespace {

using fuzz::Block;
using fuzz::Input;

constexpr int64_t kGrain = 4, kLongest = 64, kLevels = 7, kMost = 12;
constexpr int64_t kTarget = 0, kNeighbour = 1, kCopy = 2, kSlots = 3;

// Two states of unlike layers, made once. Slot kNeighbour holds a history that must never change.
struct World {
  std::vector<lla_layer_desc> descs;
  lla_context* context = nullptr;
  std::vector<lla_layer*> layers;
  lla_state* states[2] = {};
  std::vector<char> neighbour[2];
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  std::unique_ptr<Block> batch_memory, workspace;
  lla_batch* batch = nullptr;

  World() {
    lla_layer_desc absorbing = fuzz::mixer(LLA_DELTA_RULE, 1, 1, 2, 3, 3, kGrain);
    absorbing.level_overflow = LLA_LEVELS_ABSORB;
    lla_layer_desc convolution = LLA_LAYER_DESC_INIT;
    convolution.kind = LLA_LAYER_CONVOLUTION;
    convolution.hidden = 3;
    convolution.conv_width = 4;
    convolution.grain = kGrain;
    descs = {fuzz::mixer(LLA_SCALAR_GATE, 2, 1, 3, 2, kLevels, kGrain),
             fuzz::mixer(LLA_DELTA_RULE, 2, 2, 2, 2, kLevels, kGrain), fuzz::mixer(LLA_SCALAR_GATE, 1, 1, 2, 2, 0, kGrain),
             absorbing, convolution};
    lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
    options.backend = LLA_BACKEND_CPU;
    FUZZ_OK(lla_context_create(&options, &context, &error));
    for (const lla_layer_desc& d : descs) {
      lla_layer* layer = nullptr;
      FUZZ_OK(lla_layer_create(context, &d, &layer, &error));
      layers.push_back(layer);
    }
    limits.max_sequences = 1;
    limits.max_rows = kMost;
    limits.max_length = kLongest;
    size_t bytes = 0, most = 0;
    FUZZ_OK(lla_batch_size(context, &limits, &bytes, nullptr, &error));
    batch_memory = std::make_unique<Block>(bytes);
    FUZZ_OK(lla_batch_init(context, &limits, batch_memory->data(), bytes, &batch, &error));
    for (lla_layer* layer : layers) {
      FUZZ_OK(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &bytes, nullptr, &error));
      most = std::max(most, bytes);
    }
    workspace = std::make_unique<Block>(most);
    for (int i = 0; i < 2; ++i) {
      lla_state_desc d = LLA_STATE_DESC_INIT;
      d.slots = kSlots;
      d.max_length = kLongest;
      d.node_dtype = i ? LLA_BF16 : LLA_F32;
      FUZZ_OK(lla_state_create(layers.data(), static_cast<int64_t>(layers.size()), &d, nullptr, 0, &states[i], &error));
      for (const int64_t rows : {12, 12, 3}) append(states[i], kNeighbour, rows);  // nodes 1 and 2, and three rows
      neighbour[i] = image_of(states[i], kNeighbour);
    }
  }
  void append(lla_state* state, int64_t slot, int64_t count) {
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = 1;
    rows.rows_per_sequence = count;
    rows.slot_in = {&slot, LLA_I64, LLA_HOST};
    FUZZ_OK(lla_batch_plan(batch, state, &rows, nullptr, &error));
    for (size_t i = 0; i < layers.size(); ++i) {
      fuzz::Rows tensors(descs[i], count);
      lla_forward_args a = LLA_FORWARD_ARGS_INIT;
      a.batch = batch;
      a.state = state;
      a.layer_index = static_cast<int64_t>(i);
      a.io = tensors.io().data();
      a.io_count = static_cast<int64_t>(tensors.io().size());
      a.weights = tensors.weights().data();
      a.weight_count = static_cast<int64_t>(tensors.weights().size());
      a.workspace = workspace->data();
      a.workspace_bytes = workspace->size();
      FUZZ_OK(lla_layer_forward(layers[i], &a, &error));
    }
    FUZZ_OK(lla_state_commit(state, batch, {nullptr, 0, 0}, nullptr, &error));
  }
  static std::vector<char> image_of(lla_state* state, int64_t slot, const char* tag = nullptr) {
    size_t bytes = 0;
    FUZZ_OK(lla_state_export_size(state, slot, &bytes, &error));
    const Block image(bytes);
    FUZZ_OK(lla_state_pack(state, slot, image.data(), bytes, nullptr, &error));
    FUZZ_OK(lla_state_seal(image.data(), bytes, tag, &error));
    FUZZ_OK(lla_state_check(image.data(), bytes, tag, nullptr, &error));
    return {image.data(), image.data() + bytes};
  }
  static int64_t query(lla_state* state, lla_state_key key, int64_t slot = 0) {
    int64_t value = -1;
    FUZZ_OK(lla_state_query(state, key, slot, &value, &error));
    return value;
  }
  static int64_t length(lla_state* state, int64_t slot) {
    int64_t value = -1;
    FUZZ_OK(lla_state_length(state, slot, &value, &error));
    return value;
  }
  void reset(lla_state* state, int64_t slot, int64_t position) {
    FUZZ_OK(lla_state_reset(state, {&slot, LLA_I64, LLA_HOST}, 1, {&position, LLA_I64, LLA_HOST}, nullptr, &error));
  }
};

World& world() {
  static World* w = new World;
  return *w;
}

// Images of histories, each made when it is first wanted: `rows` rows from position `start` on.
const std::vector<char>& right_image(World& w, int which, int64_t start, int64_t rows) {
  static std::vector<char> images[2][4][3 * kMost + 1];
  std::vector<char>& image = images[which][start][rows];
  if (image.empty()) {
    static constexpr int64_t kStarts[] = {0, 3, 9, 20};
    w.reset(w.states[which], kTarget, kStarts[start]);
    for (int64_t done = 0; done < rows; done += kMost) w.append(w.states[which], kTarget, std::min(kMost, rows - done));
    image = World::image_of(w.states[which], kTarget);
  }
  return image;
}

// An image that was right once, after a few changes.
std::vector<char> damaged_image(Input& in, World& w, int which) {
  const int64_t start = in.below(4);
  std::vector<char> image = right_image(w, which, start, in.below(3 * kMost + 1));
  for (int64_t changes = in.below(6); changes > 0 && !image.empty(); --changes) {
    const int64_t reach = in.one_in(3) ? static_cast<int64_t>(image.size()) : 160;
    const auto at =
        static_cast<size_t>((in.byte() | in.byte() << 8) % std::min<int64_t>(reach, static_cast<int64_t>(image.size())));
    switch (in.below(5)) {
      case 0:
        image[at] = static_cast<char>(image[at] ^ (1 << in.below(8)));
        break;
      case 1:
        image[at] = static_cast<char>(in.byte());
        break;
      case 2: {  // one of the header's numbers
        const int64_t value = in.number();
        if (at / 8 * 8 + 8 <= image.size()) std::memcpy(image.data() + at / 8 * 8, &value, 8);
        break;
      }
      case 3:
        image.resize(at);
        break;
      default:
        image.insert(image.end(), at % 200, static_cast<char>(in.byte()));
    }
  }
  return image;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  World& w = world();
  Input in(data, size);
  const int which = static_cast<int>(in.below(2));
  lla_state* state = w.states[which];
  const bool seal = !in.one_in(4), raw = in.one_in(3);
  const bool serve = in.one_in(4);  // the slow part
  const int64_t rows = in.below(kMost + 1), back = in.below(kGrain + 1);
  const std::vector<char> bytes = raw ? std::vector<char>(in.rest(), in.rest() + in.left()) : damaged_image(in, w, which);
  const Block image(bytes.size());
  if (!bytes.empty()) std::memcpy(image.data(), bytes.data(), bytes.size());

  // The slot that receives the image shares its nodes with the neighbour at first.
  FUZZ_OK(lla_state_fork(state, {&kNeighbour, LLA_I64, LLA_HOST}, {&kTarget, LLA_I64, LLA_HOST}, 1, nullptr, &error));
  lla_image_info info = LLA_IMAGE_INFO_INIT;
  lla_status checked = FUZZ_CALL(lla_state_check(image.data(), image.size(), nullptr, &info, &error));
  PROMISE(checked == LLA_OK || checked == LLA_DATA_CORRUPT || checked == LLA_STATE_INCOMPATIBLE);
  PROMISE(checked != LLA_OK || (info.bytes > 0 && static_cast<size_t>(info.bytes) <= image.size() && info.format == 1));
  char tag[LLA_TAG_SIZE] = {};
  if (image.size() >= 160) std::memcpy(tag, image.data() + 96, sizeof tag);
  if (seal) {
    const std::vector<char> before(image.data(), image.data() + image.size());
    const lla_status sealed = FUZZ_CALL(lla_state_seal(image.data(), image.size(), tag, &error));
    PROMISE(sealed == LLA_OK || std::equal(before.begin(), before.end(), image.data()));
    checked = FUZZ_CALL(lla_state_check(image.data(), image.size(), tag, &info, &error));
    PROMISE((sealed == LLA_OK) == (checked == LLA_OK));
  }
  // An import wants a checked image; without the check it must still be harmless, since damage is not always visible.
  const int64_t free = World::query(state, LLA_STATE_FREE_NODE_BLOCKS);
  const lla_status status = FUZZ_CALL(lla_state_unpack(state, kTarget, image.data(), image.size(), nullptr, &error));
  if (status != LLA_OK) {
    PROMISE(World::query(state, LLA_STATE_FREE_NODE_BLOCKS) == free);
    PROMISE(World::image_of(state, kTarget) == w.neighbour[which]);
  } else {
    PROMISE(!seal || (checked == LLA_OK && World::length(state, kTarget) == info.position));
    const std::vector<char> taken = World::image_of(state, kTarget, tag);
    PROMISE(!seal || taken.size() == static_cast<size_t>(info.bytes));
    // Every number of the header came in: kind, position, start, layers, grain, rows of convolutions, nodes, floor.
    PROMISE(!seal || std::equal(taken.begin() + 32, taken.begin() + 96, image.data() + 32));
    int64_t low = -1;
    FUZZ_OK(lla_state_min_length(state, kTarget, &low, &error));
    const int64_t at = World::length(state, kTarget);
    PROMISE(low >= 0 && low <= at && at <= kLongest);
    FUZZ_OK(lla_state_fork(state, {&kTarget, LLA_I64, LLA_HOST}, {&kCopy, LLA_I64, LLA_HOST}, 1, nullptr, &error));
    FUZZ_OK(lla_state_truncate(state, kTarget, std::max(low, at - back), nullptr, &error));
    if (serve) w.append(state, kTarget, std::min(rows, kLongest - World::length(state, kTarget)));
    // What came out once comes in again and out the same; it also goes on from there as the first one does.
    FUZZ_OK(lla_state_unpack(state, kTarget, taken.data(), taken.size(), nullptr, &error));
    PROMISE(World::image_of(state, kTarget, tag) == taken && World::image_of(state, kCopy, tag) == taken);
    if (serve) {
      w.append(state, kTarget, std::min(rows, kLongest - at));
      w.append(state, kCopy, std::min(rows, kLongest - at));
      PROMISE(World::image_of(state, kTarget) == World::image_of(state, kCopy));
    }
  }
  w.reset(state, kTarget, 0);
  w.reset(state, kCopy, 0);
  PROMISE(World::image_of(state, kNeighbour) == w.neighbour[which]);
  PROMISE(World::query(state, LLA_STATE_FREE_NODE_BLOCKS) ==
          World::query(state, LLA_STATE_NODE_BLOCKS) - World::query(state, LLA_STATE_SLOT_NODES, kNeighbour));
  return 0;
}
