"""Ask about a picture: python examples/vision.py PICTURE [URL]; the served model has to take images."""

import sys
from pathlib import Path

from mstar.client import Client, ClientError, image_part, text_part


def main(picture: str, url: str = "http://127.0.0.1:8000") -> None:
    with Client(url) as client:
        if "image" not in client.models()[0].modalities.input:
            sys.exit("the served model takes no images; one that does: mstar serve qwen3_5")
        content = [image_part(Path(picture)), text_part("What is in this picture?")]
        answer = client.chat([{"role": "user", "content": content}], max_tokens=256)
        if answer.message.reasoning_content:
            print(f"it thought: {answer.message.reasoning_content}")
        print(answer.text)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (ClientError, OSError) as error:
        sys.exit(str(error))
