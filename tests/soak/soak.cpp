// SPDX-License-Identifier: Apache-2.0
// Serves ragged batches for a given time, one server after the other, and compares every sequence that has left with the
// same calls made alone (bits) and with one pass (the tolerance of another cut).
//   soak [--seconds N] [--seed S] [--round R]    a failure names the seed and round that repeat it
#include <chrono>
#include <csignal>

#include "server.h"

namespace {

using soak::Counts;

constexpr int64_t kSteps = 150;  // of one server
constexpr int64_t kFewest = 6;   // servers: by then everything has happened

struct Options {
  double seconds = 3;
  uint64_t seed = 1;
  int64_t round = -1;  // only this one
};

// Where the program is, for whoever looks at a broken promise.
struct Place {
  uint64_t seed = 0;
  int64_t round = 0, step = 0;
} place;

void say_place(int) {
  std::fprintf(stderr, "in step %lld of: soak --seed %llu --round %lld\n", static_cast<long long>(place.step),
               static_cast<unsigned long long>(place.seed), static_cast<long long>(place.round));
}

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) return false;
    const std::string name = argv[i];
    if (name == "--seconds")
      options->seconds = std::atof(argv[i + 1]);
    else if (name == "--seed")
      options->seed = std::strtoull(argv[i + 1], nullptr, 10);
    else if (name == "--round")
      options->round = std::atoll(argv[i + 1]);
    else
      return false;
  }
  return true;
}

double serve_round(Counts* counts) {
  soak::Random random(place.seed * 1000003 + static_cast<uint64_t>(place.round));
  soak::Form form;
  static constexpr int64_t kGrains[] = {64, 16, 4};
  form.grain = kGrains[random.below(3)];
  form.node_dtype = random.one_in(4) ? LLA_BF16 : LLA_F32;
  form.squared = random.one_in(2);
  const soak::Model model(form);
  double worst = 0;
  {
    soak::Server server(model, random.next(), counts);
    for (place.step = 0; place.step < kSteps; ++place.step) server.step();
    server.close();
    if (form.node_dtype == LLA_F32) worst = server.worst();
  }
  PROMISE(soak::Server::outstanding() == 0);
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, &options)) {
    std::fprintf(stderr, "usage: soak [--seconds N] [--seed S] [--round R]\n");
    return 2;
  }
  Counts n;
  double worst = 0;
  std::signal(SIGABRT, say_place);
  place.seed = options.seed;
  place.round = std::max<int64_t>(options.round, 0);
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  int64_t rounds = 0;
  double told = 0;
  const auto tell = [&] {
    std::printf(
        "%.0f s, %lld servers: %lld sequences came, %lld left and were right; %lld rows in, %lld rejected, %lld drafts, "
        "%lld forks, %lld reorders, %lld snapshots, %lld begun from one, %lld truncations, %lld exports, %lld restores, "
        "%lld dropped, %lld times no blocks, %lld discarded steps, %lld steps of two threads; one pass is off by %.1e\n",
        passed(), static_cast<long long>(rounds), static_cast<long long>(n.arrivals), static_cast<long long>(n.finished),
        static_cast<long long>(n.rows), static_cast<long long>(n.rejected), static_cast<long long>(n.drafts),
        static_cast<long long>(n.forks), static_cast<long long>(n.reorders), static_cast<long long>(n.snapshots),
        static_cast<long long>(n.prefixes), static_cast<long long>(n.truncations), static_cast<long long>(n.exports),
        static_cast<long long>(n.restores), static_cast<long long>(n.drops), static_cast<long long>(n.shortages),
        static_cast<long long>(n.discards), static_cast<long long>(n.together), worst);
    std::fflush(stdout);
    told = passed();
  };
  do {
    worst = std::max(worst, serve_round(&n));
    ++rounds;
    ++place.round;
    if (passed() - told > 60) tell();
  } while (options.round < 0 && (rounds < kFewest || passed() < options.seconds));
  tell();
  if (options.round >= 0) return 0;
  // A server that never did one of these has not been tested.
  for (const int64_t count : {n.finished, n.rejected, n.drafts, n.forks, n.reorders, n.snapshots, n.prefixes, n.truncations,
                              n.exports, n.restores, n.drops, n.shortages, n.discards, n.together})
    PROMISE(count > 0);
  return 0;
}
