"""Special token ids of Harmony and the words of its headers; facts of the format, used by rendering and parsing."""

from __future__ import annotations

RETURN = 200_002
CONSTRAIN = 200_003
CHANNEL = 200_005
START = 200_006
END = 200_007
MESSAGE = 200_008
CALL = 200_012

MESSAGE_ENDS = frozenset({RETURN, END, CALL})
REPLY_ENDS = frozenset({RETURN, CALL})  # where the engine stops; <|end|> only parts two messages of one reply
END_OF_TEXT = 199_999

ASSISTANT = "assistant"
SYSTEM = "system"
ROLES = frozenset({ASSISTANT, "user", SYSTEM, "developer", "tool"})
ANALYSIS = "analysis"
COMMENTARY = "commentary"
FINAL = "final"
CHANNELS = (ANALYSIS, COMMENTARY, FINAL)
FUNCTIONS = "functions."
CONTENT_TYPES = ("json", "code", "text", "python", "javascript", "yaml", "xml")
