"""A tiny model with a tokenizer and a chat template, for agents."""

import json

from examples.quickstart.make_model import make_tokenizer

TEMPLATE = (
    "{% for message in messages %}<pad>{{ message.role }}:{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<pad>assistant:{% endif %}"
)


def folder_with_template(model, folder, template=TEMPLATE):
    """The model's files, by links, and the tokenizer's."""
    folder.mkdir(exist_ok=True)
    made = make_tokenizer()
    made.chat_template = template
    made.save_pretrained(folder)
    for path in model.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder


def write_rows(path, *rows):
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": "is it wet?"}], **row}) + "\n"
            for row in rows
        )
    )
    return path
