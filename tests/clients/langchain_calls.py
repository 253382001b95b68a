"""Tool calls by langchain's client: python langchain_calls.py URL MODEL. Writes the results as JSON."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class CityForecast(BaseModel, extra="forbid"):
    """Tells the weather."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


def main() -> None:
    """Call tools in every way that langchain offers, and print the calls."""
    url, model = sys.argv[1:]
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=300, seed=3, max_retries=0)
    bound = chat.bind_tools([CityForecast], tool_choice="required", parallel_tool_calls=False)
    asked = HumanMessage("Bonn?")
    whole = bound.invoke([asked])
    streamed = None
    for chunk in bound.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    (call,) = whole.tool_calls
    history = [asked, whole, ToolMessage("rain", tool_call_id=call["id"])]
    found = {
        "whole": call["args"],
        "streamed": streamed.tool_calls[0]["args"],
        "by_tool": chat.with_structured_output(CityForecast, method="function_calling").invoke([asked]).model_dump(),
        "by_schema": chat.with_structured_output(CityForecast, method="json_schema").invoke([asked]).model_dump(),
        "again": bound.invoke(history).tool_calls[0]["args"],
    }
    print(json.dumps(found))


main()
