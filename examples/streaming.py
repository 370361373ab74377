"""An answer as it is written, what the model thinks included: python examples/streaming.py [URL]"""

import sys

from mstar.client import Client, ClientError, FinishEvent, ReasoningEvent, TextEvent, UsageEvent


def main(url: str = "http://127.0.0.1:8000") -> None:
    with Client(url) as client, client.stream_chat("Tell me a short story.", max_tokens=100) as stream:
        for event in stream:
            match event:
                case ReasoningEvent(text=text):
                    print(f"\033[2m{text}\033[0m", end="", flush=True)
                case TextEvent(text=text):
                    print(text, end="", flush=True)
                case FinishEvent(reason=reason):
                    print(f"\n({reason})")
                case UsageEvent(usage=usage):
                    print(f"{usage.completion_tokens} tokens")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ClientError as error:
        sys.exit(str(error))
