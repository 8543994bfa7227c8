#!/usr/bin/env bash
# Measure on this machine's GPU what docs/speed.md and docs/training.md show, part by part, the most wanted first.
#
#     benchmarks/gpu.sh OUT [PART ...]       parts: operator layer model decode train small reads sweep answers
#
# Every part has a time limit and writes its files into OUT as it goes, so a run that is cut short still tells something.
# Copy the JSON files to benchmarks/results and make the page anew: ccq bench tables benchmarks/results > docs/speed.md
set -u
if [ $# -lt 1 ]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
out=$1
shift
parts=${*:-operator layer model decode train small reads sweep answers}
mkdir -p "$out"
ccq="${PYTHON:-python} -m ccq.cli"
recipe=recipes/benchmark/1.3b.yaml

limited() {  # SECONDS NAME COMMAND...
  local seconds=$1 name=$2
  shift 2
  echo "== $name, at most $seconds s: $*"
  timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
  local code=$?
  tail -n 40 "$out/$name.txt"
  echo "== $name: exit $code (124: cut short)"
}

for part in $parts; do
  case $part in
    operator) limited 150 operator $ccq bench operator --rows 1 8 --long --limit 5 --out "$out/operator.json" ;;
    layer)
      for backbone in gated-deltanet gla; do
        limited 240 "layer-$backbone" $ccq bench layer --backbones $backbone --repeats 20 --limit 3 --profile --out "$out/layer-$backbone.json"
      done
      ;;
    model)
      for backbone in gated-deltanet gla; do
        limited 240 "model-$backbone" $ccq bench model --arms $backbone $backbone+ccq --repeats 8 --limit 8 --out "$out/model-$backbone.json"
      done
      ;;
    decode)
      for backbone in gated-deltanet gla; do
        limited 200 "decode-$backbone" $ccq bench decode --arms $backbone $backbone+ccq --repeats 10 --limit 8 --out "$out/decode-$backbone.json"
      done
      ;;
    train)
      for arm in gla+ccq gla gated-deltanet+ccq gated-deltanet; do
        for compile in false true; do
          limited 150 "train-$arm-compile-$compile" $ccq train $recipe --set model.preset=$arm-1.3b \
            --set system.compile=$compile --out "$out/train-$arm-compile-$compile"
        done
      done
      ;;
    small)
      for arm in gla+ccq gla gated-deltanet+ccq gated-deltanet; do
        for graph in true false; do
          limited 90 "small-$arm-graph-$graph" $ccq train recipes/benchmark/60m.yaml --set model.preset=$arm-60m \
            --set system.cuda_graph=$graph --out "$out/small-$arm-graph-$graph"
        done
      done
      ;;
    reads)
      names='import json, sys; print(*("gla+" + r["name"] for r in json.load(sys.stdin) if r["name"] != "none"))'
      reads=$($ccq reads --json | "${PYTHON:-python}" -c "$names")
      limited 400 reads $ccq bench model --arms gla $reads --scale 60m --rows 8 --tokens 2048 --repeats 8 --limit 4 --out "$out/model-reads.json"
      ;;
    sweep) limited 400 sweep $ccq bench model --sweep tokens=32768 --repeats 3 --limit 3 --out "$out/model-sweep.json" ;;
    answers)
      limited 200 answers "${PYTHON:-python}" benchmarks/answers.py --out "$out/answers.json"
      ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
