for p in fp16 fp8; do
  python nlp_example.py --mixed_precision $p
done
