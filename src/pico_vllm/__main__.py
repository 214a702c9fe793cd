"""``python -m pico_vllm``: the command line without the console script."""

from pico_vllm.cli import main

if __name__ == "__main__":
    main()
