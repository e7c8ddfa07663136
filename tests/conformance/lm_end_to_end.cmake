# SPDX-License-Identifier: Apache-2.0
# Usage: cmake -DLM=program -DTEXT=file -DDIR=folder [-DRUN=command before the program] -P this
# Trains two tiny models, one of them with a stop and a resume that must end in the same bytes, evaluates and generates.
file(REMOVE_RECURSE ${DIR})
file(MAKE_DIRECTORY ${DIR})

function(lm out)
  execute_process(COMMAND ${RUN} ${LM} ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE errors)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "lm ${ARGN}: exit code ${code}\n${text}\n${errors}")
  endif()
  set(${out} "${text}${errors}" PARENT_SCOPE)
endfunction()
function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "'${pattern}' is not in:\n${text}")
  endif()
endfunction()

set(size --data ${TEXT} --hidden 32 --heads 2 --state 16 --context 64 --batch 2 --threads 2 --save-every 6)
lm(text train ${size} --steps 12 --out ${DIR}/whole)
expect("${text}" "held-out loss [0-9.]+ nats per byte \\(byte bigrams: [0-9.]+\\)")

# The stop: the checkpoint of step 6 of the same plan, taken as a killed run would leave it.
execute_process(COMMAND ${RUN} ${LM} train ${size} --steps 12 --out ${DIR}/cut --stop-after 6 RESULT_VARIABLE code OUTPUT_QUIET)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "training up to step 6 failed")
endif()
lm(text train --resume --out ${DIR}/cut --threads 1)
expect("${text}" "resumed after step 6")
foreach(file model.safetensors training.safetensors config.json)
  file(SHA256 ${DIR}/whole/${file} one)
  file(SHA256 ${DIR}/cut/${file} two)
  if(NOT one STREQUAL two)
    message(FATAL_ERROR "${file}: the resumed run differs from the uninterrupted one")
  endif()
endforeach()

lm(text train ${size} --steps 6 --block gdn --linear --out ${DIR}/linear)
lm(text eval --model ${DIR}/whole --model ${DIR}/linear --data ${TEXT} --length 128 --svg ${DIR}/loss.svg)
expect("${text}" "64-127")
file(READ ${DIR}/loss.svg svg)
expect("${svg}" "<polyline.*<polyline.*</svg>")
# Probe S4.
lm(text generate --model ${DIR}/whole --prompt "The License" --tokens 40 --piece 3 --seed 5)
expect("${text}" "The License.*prefill: 11 tokens.*decode:  40 tokens.*state at 51 tokens")
lm(again generate --model ${DIR}/whole --prompt "The License" --tokens 40 --piece 3 --seed 5 --threads 1)
string(REGEX REPLACE "prefill:.*" "" text "${text}")
string(REGEX REPLACE "prefill:.*" "" again "${again}")
if(NOT text STREQUAL again)
  message(FATAL_ERROR "the same seed gave another text")
endif()

# Mistakes are told, with exit code 1.
foreach(mistake "generate;--model;${DIR}/nowhere;--prompt;x" "train;--data;${TEXT};--out;${DIR}/x;--heads;7"
                "eval;--bogus" "train;--lr;fast")
  execute_process(COMMAND ${RUN} ${LM} ${mistake} RESULT_VARIABLE code OUTPUT_QUIET ERROR_VARIABLE errors)
  if(NOT code EQUAL 1 OR errors STREQUAL "")
    message(FATAL_ERROR "lm ${mistake}: exit code ${code}, '${errors}'")
  endif()
endforeach()
