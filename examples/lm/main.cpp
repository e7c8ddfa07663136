// SPDX-License-Identifier: Apache-2.0
// lm: trains, evaluates and runs small byte-level language models on log-linear attention.
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "commands.h"

namespace {

struct Command {
  const char* name;
  int (*run)(int, char**);
  const char* help;
};
constexpr Command kCommands[] = {
    {"train", lm::train_command, "train a byte-level model on text files"},
    {"eval", lm::eval_command, "loss of one or two models on a text, by position in the context"},
    {"generate", lm::generate_command, "continue a prompt, with prefill in pieces and decode from the state"},
};

void print_help(std::FILE* out) {
  std::fprintf(out,
               "usage: lm COMMAND [options]\n\nTrains and runs small language models on log-linear attention (lla "
               "%s).\n\ncommands:\n",
               lla_version_string());
  for (const Command& c : kCommands) std::fprintf(out, "  %-10s %s\n", c.name, c.help);
  std::fprintf(out, "\n'lm COMMAND --help' lists the options of a command.\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    print_help(stderr);
    return 2;
  }
  if (!std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h") || !std::strcmp(argv[1], "help")) {
    print_help(stdout);
    return 0;
  }
  for (const Command& c : kCommands) {
    if (std::strcmp(argv[1], c.name) != 0) continue;
    try {
      return c.run(argc - 2, argv + 2);
    } catch (const std::bad_alloc&) {
      std::fprintf(stderr, "lm %s: out of memory\n", c.name);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "lm %s: %s\n", c.name, e.what());
    }
    return 1;
  }
  std::fprintf(stderr, "lm: there is no command '%s'; 'lm --help' lists them\n", argv[1]);
  return 2;
}
