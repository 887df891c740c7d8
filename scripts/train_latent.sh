#!/usr/bin/env bash
# Trains a latent prior on one CUDA GPU: scripts/train_latent.sh PART MINUTES
#
#   autoencoder  the autoencoder, 12.8 M parameters, 8×: 7.2 minutes of an H200 for models/latent
#   prior        the prior of its latents, 24.8 M parameters: 8 minutes
#   measure      both against their ceiling, on the held-out pictures
#
# DATA names the archives of photographs, RUNS a folder for the results (runs), DDC the command (ddc), MODEL the folder that is
# made of both (models/latent). Every 36th picture is kept for validation; VALIDATION names these, for the part measure.
set -euo pipefail
part=$1 minutes=$2
ddc=${DDC:-ddc} runs=${RUNS:-runs} model=${MODEL:-models/latent}
common="--data $DATA --holdout 36 --compile --schedule decay --total-minutes $minutes --minutes $minutes --validation-limit 50
  --shard-mb 15 --save-every 2000 --keep 1 --pictures-every 2000 --log-every 100 --export-every-minutes 3 --seed ${SEED:-0}"
solvers="resample:iterations=100,psld,hgu,autoencoder"

case $part in
autoencoder)
  $ddc train autoencoder $common --out "$runs/autoencoder" --batch-size 32 --learning-rate 3e-4 --warmup 300 --ema 0.999 \
    --decay-share 0.5 ;;
prior)
  $ddc train latent $common --out "$runs/latent" --autoencoder "$runs/autoencoder/vae" --batch-size 256 --draws-per-picture 4 \
    --learning-rate 4e-4 --warmup 300 --ema 0.999 --decay-share 0.5
  $ddc export "$runs/latent" "$model" --dtype 8bit ;;
measure)
  $ddc evaluate --images "$VALIDATION" --model "$model" --out "$runs/measured-latent" --solver "$solvers" --size 256 \
    --task sr4,gauss,inpaint92 --sigma 0,0.05 --minutes "$minutes" --batch-size 8 --slow-limit 16
  $ddc evaluate --images "$VALIDATION" --model "$model" --out "$runs/measured-ceiling" --solver autoencoder --size 256 \
    --task denoise --sigma 0 --batch-size 8 ;;
*)
  sed -n '2,10p' "$0" >&2
  exit 2 ;;
esac
