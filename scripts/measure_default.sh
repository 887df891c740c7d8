#!/usr/bin/env bash
# Measures the shipped model on one CUDA GPU, as the model card and the documentation report it:
# scripts/measure_default.sh PART…
#
#   validation  the default model and its variant, nine settings, 150 validation pictures
#   thousand    the same on IMAGES, all of them
#   faces       the same on FACES
#   solvers     every fast solver, nine settings, 50 validation pictures; bridges too
#   slow        DPS and MCG, on the same pictures
#   tables      tables 1 to 3 and figure 7 of the paper, 100 of IMAGES; DPS on 10
#   figure2     its figure 2, DPS on 10
#   table4      its table 4, 100 of IMAGES (DPS on 5), one at a time; nothing else may run on the computer
#   seconds     the solvers that are not in table 4, 10 validation pictures (MCG: one), likewise
#   steps       1 to 10 steps, 150 validation pictures
#   spread      four samples of one measurement, 50 validation pictures
#
# VALIDATION, IMAGES and FACES name folders or archives, VGG16 the weights, OUT a folder (runs), DDC the command, WAY the
# options of a run. Rows are written without a report; the same commands without --no-report write it, on any computer.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
default=${MODELS:-$repository/src/ddc/models/default} variant=${VARIANT:-$repository/models/no-lpips}
ddc=${DDC:-ddc} out=${OUT:-runs} way=${WAY:---device cuda --precision fp16 --compile --no-report}
both="--model $default:name=default,$variant:name=no-lpips" vgg16="--vgg16 ${VGG16:-vgg16.safetensors}"
nine="--task sr4,sr8,gauss,inpaint92,jpeg10:sigma=0 --sigma 0,0.05"
hundred="--limit 100 --slow-limit 10 $vgg16 $way"

for part in "$@"; do
  case $part in
  validation) $ddc evaluate $way --images "$VALIDATION" --limit 150 --batch-size 50 --keep 0 $nine $both --out "$out/validation" ;;
  thousand) $ddc evaluate $way $vgg16 --images "$IMAGES" --batch-size 50 --keep 0 $nine $both --out "$out/thousand" ;;
  faces) $ddc evaluate $way $vgg16 --images "$FACES" --batch-size 50 --keep 0 $nine $both --out "$out/faces" ;;
  solvers) $ddc evaluate $way --images "$VALIDATION" --limit 50 --batch-size 50 --keep 2 $nine --model "$default:name=default" \
    --solver ddc,posterior,posterior:realism=0,ddnm,ddrm,pigdm,reddiff,pnp-admm,cddb,i2sb,i2sb:steps=1,i2sb:steps=5,dds,diffpir,pinv --out "$out/solvers" ;;
  slow) $ddc evaluate $way --images "$VALIDATION" --limit 50 --batch-size 50 --keep 2 $nine --model "$default:name=default" \
    --solver dps,mcg --out "$out/slow" ;;
  tables)
    for name in table3 table2 table1 figure7; do
      $ddc reproduce $name $hundred --images "$IMAGES" --model "$default" --models "$variant:name=no-lpips" --batch-size 50 --out "$out/$name"
    done ;;
  figure2) $ddc reproduce figure2 $hundred --images "$IMAGES" --model "$default" --batch-size 10 --out "$out/figure2" ;;
  table4) $ddc reproduce table4 --limit 100 --slow-limit 5 $vgg16 ${way/--compile/} --images "$IMAGES" --model "$default" --out "$out/table4" ;;
  seconds) $ddc evaluate --limit 10 --slow-limit 1 $vgg16 ${way/--compile/} --images "$VALIDATION" --keep 0 --task sr4 --sigma 0 \
    --model "$default:name=default" --solver pinv,i2sb,dds,diffpir,mcg --out "$out/seconds" ;;
  steps) $ddc evaluate $way --images "$VALIDATION" --limit 150 --batch-size 50 --keep 0 --task sr4,inpaint92 --sigma 0 --steps 1,2,3,5,10 \
    --model "$default:name=default" --out "$out/steps" ;;
  spread) $ddc evaluate $way --images "$VALIDATION" --limit 50 --batch-size 50 --keep 0 --task sr4,sr8,inpaint92 --sigma 0.05 --samples 4 \
    --model "$default:name=default" --out "$out/spread" ;;
  *)
    sed -n '2,18p' "$0" >&2
    exit 2 ;;
  esac
done
