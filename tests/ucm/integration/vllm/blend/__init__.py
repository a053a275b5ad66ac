"""Tests of BlendConnector's two sides."""
